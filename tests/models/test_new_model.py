"""docs/howto/add_model.md is true: a new model is one file and one line, and the program knows it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from xla_flags import xla_flags

ROOT = pathlib.Path(__file__).parent.parent.parent
LINE = '    "mine": ("jaxscale.core.models.mine:MineConfig", "jaxscale.core.models.mine:Mine"),\n'
MODEL = '''"""Attention and a ReLU MLP, each added to the residual stream."""

import dataclasses
from typing import Literal

import jax
from flax import nnx

from jaxscale.core.models.config import ModelConfig
from jaxscale.core.models.layers import Block, constant, make_stack, param, run_stack
from jaxscale.kernels.vocabulary import lookup_sharded
from jaxscale.kernels.norm import rms_norm
from jaxscale.schema import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class MineConfig(ModelConfig):
    """Mine."""

    name: Literal["mine"] = setting("mine", "which model this is")
    head_dim: int = setting(8, "size of one head")
    mlp_dim: int = setting(32, "width of the MLP")

    @property
    def num_params(self) -> int:
        """All."""
        return self.matmul_params + (2 * self.num_layers + 1) * self.embed_dim


class MineBlock(Block):
    """A block."""

    def __init__(self, cfg, *, rngs, plan):
        D, N, H, F = cfg.embed_dim, cfg.num_heads, cfg.head_dim, cfg.mlp_dim
        self.cfg, self.plan = cfg, plan
        self.norm, self.mlp_norm = constant((D,), ("norm",), 1.0), constant((D,), ("norm",), 1.0)
        self.wq, self.wk, self.wv = (param(rngs, (D, N, H), ("embed", "heads", "head_dim"), fan_in=D) for _ in "qkv")
        self.wo = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), fan_in=N * H)
        self.up = param(rngs, (D, F), ("embed", "mlp"), fan_in=D)
        self.down = param(rngs, (F, D), ("mlp", "embed"), fan_in=F)

    def __call__(self, x_BTD, layer_input, segment_ids_BT):
        project, tensor, eps = self.plan.project, self.plan.tensor, self.cfg.norm_eps
        h_BTD = tensor.all_gather(rms_norm(x_BTD, self.norm[...], eps))
        q, k, v = (project("BTD,DNH->BTNH", h_BTD, w[...]) for w in (self.wq, self.wk, self.wv))
        out = self.plan.attend(q, k, v, segment_ids_BT)
        x_BTD = x_BTD + tensor.reduce_scatter(project("BTNH,NHD->BTD", out, self.wo[...]))
        h_BTD = tensor.all_gather(rms_norm(x_BTD, self.mlp_norm[...], eps))
        h_BTF = jax.nn.relu(project("BTD,DF->BTF", h_BTD, self.up[...]))
        return x_BTD + tensor.reduce_scatter(project("BTF,FD->BTD", h_BTF, self.down[...]))


class Mine(nnx.Module):
    """The decoder."""

    def __init__(self, cfg, *, rngs, plan):
        self.cfg, self.plan = cfg, plan
        self.embedding = param(rngs, (cfg.vocab_size, cfg.embed_dim), ("vocab", "embed"), std=0.02)
        make_block = lambda rngs: MineBlock(cfg, rngs=rngs, plan=plan)
        self.blocks = make_stack(make_block, rngs, cfg.num_layers, cfg.scan_layers)
        self.final_norm = constant((cfg.embed_dim,), ("norm",), 1.0)

    def hidden(self, tokens_BT, positions_BT, segment_ids_BT, keys_B=None):
        """The normalised residual stream."""
        cfg = self.cfg
        table_VD = self.plan.gather(self.embedding[...], ("vocab", "embed"), cfg.embed_dtype)
        x_BTD = lookup_sharded(table_VD, tokens_BT, cfg.embed_dtype, self.plan.tensor).astype(cfg.compute_dtype)
        x_BTD, _ = run_stack(self.blocks, x_BTD, None, (segment_ids_BT,), cfg, self.plan)
        return rms_norm(x_BTD, self.final_norm[...], cfg.norm_eps)

    def unembedding(self, h_BTD):
        """(h_BTD, the table)."""
        return h_BTD, self.plan.gather(self.embedding[...], ("vocab", "embed"), self.cfg.embed_dtype).T
'''
CONFIG = """import ml_collections

def get_config():
    model = dict(name="mine", vocab_size=64, num_layers=2, embed_dim=16, num_heads=2, compute_dtype="float32")
    return ml_collections.ConfigDict(dict(
        seq_len=16, batch_tokens=128, train_tokens="5 steps", model=model, data=dict(name="synthetic"),
        optim=dict(peak_lr=1e-2, warmup_tokens="1 steps"), monitor=dict(log_every_steps=1, tensorboard=False),
    ))
"""


def package_with_the_model(folder: pathlib.Path) -> None:
    """The package as it is, by links, but for one file more and one line more."""
    models = folder / "jaxscale" / "core" / "models"
    models.mkdir(parents=True)
    for parent, changed in (("jaxscale", "core"), ("jaxscale/core", "models")):
        for path in (ROOT / parent).iterdir():
            if path.name != changed:
                (folder / parent / path.name).symlink_to(path)
    for path in (ROOT / "jaxscale" / "core" / "models").glob("*.py"):
        if path.name != "__init__.py":
            (models / path.name).symlink_to(path)
    registry = (ROOT / "jaxscale" / "core" / "models" / "__init__.py").read_text()
    assert registry.count("MODELS = {\n") == 1
    (models / "__init__.py").write_text(registry.replace("MODELS = {\n", "MODELS = {\n" + LINE))
    (models / "mine.py").write_text(MODEL)
    (folder / "config.py").write_text(CONFIG)


@pytest.mark.soak
def test_a_new_model_is_one_file_and_one_line(tmp_path):
    package_with_the_model(tmp_path)
    env = os.environ | {"PYTHONPATH": str(tmp_path), "XLA_FLAGS": xla_flags(2)}

    def run(*command: str) -> str:
        command = [sys.executable, "-m", *command]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("jaxscale.cli", "plan", "--config=config.py", "--topology=h100:1x2", "--json=plan.json")
    assert (
        json.loads((tmp_path / "plan.json").read_text())["params"] == 64 * 16 + 2 * (4 * 16**2 + 2 * 16 * 32) + 5 * 16
    )
    mesh = ("--config.mesh.tensor=2", "--config.mesh.fsdp=1")
    run("jaxscale.main", "--config=config.py", "--workdir=run", *mesh)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(set(losses)) == 5 and all(4 < loss < 4.4 for loss in losses)  # of random tokens: near log(64)
