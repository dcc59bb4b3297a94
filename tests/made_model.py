"""Work folders with an untrained tiny model in them, for the tests of what opens one."""

import pathlib

import jax
import tiny

from jaxscale import schema
from jaxscale.build import make_program
from jaxscale.core.optim.groups import is_masked
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.text.tokenizer.load import load_tokenizer, save_tokenizer
from jaxscale.system import paths


def make_workdir(folder, overrides=None, steps=(3,), scale=1.0):
    """A run of the tiny model with bytes as tokens: its config, the folder of its tokenizer and these steps.

    scale: of the parameters, so that the likeliest token is clear; the running average is half of them.
    """
    cfg = tiny.config({"model.vocab_size": 258, "data.name": "stdlib"} | (overrides or {}))
    program = make_program(cfg, resolve_budget(cfg, 1 << 20), jax.devices()[:1])
    state = program.init()
    checkpoints = Checkpoints(pathlib.Path(folder) / "checkpoints", CheckpointConfig(keep_last=99))
    resolved = {"config": schema.to_dict(cfg)}
    for step in steps:
        factor = scale * (1 + step / 100)
        params = jax.tree.map(lambda leaf, factor=factor: leaf * factor, state.params)
        half = lambda leaf, average: average if is_masked(average) else leaf / 2
        ema = None if state.ema is None else jax.tree.map(half, params, state.ema)
        checkpoints.save(step, state._replace(params=params, ema=ema), resolved | {"step": step}, wait=True)
    checkpoints.close()
    paths.write_json(pathlib.Path(folder) / "config.json", resolved)
    save_tokenizer(load_tokenizer("bytes"), folder)
    return program
