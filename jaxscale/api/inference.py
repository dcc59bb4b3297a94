"""Trained or converted models for inference: weights on a mesh, tokenizer, and generation.

Optimizer state and data are not read. B batch  T position
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxscale import schema, units
from jaxscale.api import Say, silent
from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.lora_mup_config import LoraConfig
from jaxscale.core.models.sharded import ShardedModel, shard_model
from jaxscale.core.plan import ParallelSettings, resolve_plan
from jaxscale.program.auto_dtype import model_for_device
from jaxscale.runtime.checkpoint.branch import open_source
from jaxscale.runtime.checkpoint.record import named_leaves, weight_leaves
from jaxscale.runtime.hosts.meshes import mesh_layout
from jaxscale.runtime.sampling.generator import Engine, Generator
from jaxscale.runtime.text.tokenizer.base import Tokenizer
from jaxscale.runtime.text.tokenizer.fitting import describe_unused, fits, limit_vocabulary
from jaxscale.runtime.text.tokenizer.load import SavedTokenizer, open_saved
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop.families import family_for

DEFAULT_MESH = MeshConfig()


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its weights. The tokenizer is None if the run did not record its tokenizer."""

    cfg: AnyModelConfig
    seq_len: int  # tokens per row in training
    params: Any  # nested dicts of arrays, on the mesh
    mesh: Mesh
    tokenizer: Tokenizer | None
    step: int
    path: str  # path of the checkpoint
    run: Mapping[str, Any]  # the run's record in the checkpoint, such as config, data and versions
    sharded: ShardedModel
    saved_tokenizer: SavedTokenizer | None  # the tokenizer with its text settings
    what: str = "params"  # "params" or "ema"

    @property
    def kept(self) -> SavedTokenizer | None:
        """Old name of saved_tokenizer."""
        return self.saved_tokenizer


def open_model(
    path: str,
    *,
    step: int | None = None,
    what: Literal["params", "ema"] = "params",
    mesh: MeshConfig = DEFAULT_MESH,
    compute_dtype: str | None = None,
    tokenizer: str = "",
    say: Say = print,
    named: str = "--workdir",
) -> LoadedModel:
    """Loads the model of a work folder, or of WORKDIR/checkpoints/STEP, with bitwise equal weights.

    step: by default the newest. what: the weights or their EMA. compute_dtype: by default as in training. tokenizer: a
    file or 'bytes', for a folder without a tokenizer. say: function that logs a line. named: name of `path` in errors.

    Raises BadInput if `path` has no checkpoint, the tokenizer cannot be read, or the mesh does not fit the model, and
    Stop(CHECKPOINT_CORRUPT) for corrupted arrays.
    """
    source = open_source(path, wanted=step, named=named, log=say)
    if step is not None and source.step != step:
        raise BadInput(f"{named}={path} is the checkpoint of step {source.step}, but step={step} is set; remove step")
    run = source.record["run"]
    chosen_mesh = make_mesh(mesh)
    cfg, config = read_model_config(source, compute_dtype), run["config"]
    cfg = model_for_device(cfg, chosen_mesh.devices.flat[0])  # a converted model has compute_dtype=auto
    lora = schema.convert(config.get("lora") or {}, LoraConfig, "lora")  # missing in older records
    plan = resolve_plan(cfg, chosen_mesh, ParallelSettings(config.get("rules", "zero3")))
    sharded = shard_model(cfg, plan, lora)
    workdir = source.checkpoints.directory.parent
    saved = open_saved(workdir, config.get("data", {}), converted=bool(run.get("converted")), named=tokenizer)
    if saved is not None and not fits(saved.tokenizer, cfg.vocab_size):
        raise BadInput(
            f"tokenizer {saved.tokenizer.name} has {saved.tokenizer.vocab_size} token ids, but the model of {source} "
            f"has only {cfg.vocab_size}; use the model's tokenizer"
        )
    if saved is not None and (line := describe_unused(saved.tokenizer, cfg.vocab_size)):
        say(f"{saved.tokenizer.name} {line}")
        saved = dataclasses.replace(saved, tokenizer=limit_vocabulary(saved.tokenizer, cfg.vocab_size))
    average = ", EMA of the weights" if what == "ema" else ""
    adapters = f", with adapters of rank {lora.rank}" if lora.on else ""
    say(  # logged before the arrays are read, which can take minutes
        f"{source}: {kind_of(cfg, run)}, {units.count(cfg.num_params)} parameters, {cfg.compute_dtype}{average}"
        f"{adapters}; {mesh_layout(sharded.mesh)}"
    )
    params = restore_params(source, sharded, what, named)
    return LoadedModel(
        cfg=cfg,
        seq_len=int(config.get("seq_len", 1024)),
        params=params,
        mesh=sharded.mesh,
        tokenizer=saved and saved.tokenizer,
        step=source.step,
        path=str(source),
        run=run,
        sharded=sharded,
        saved_tokenizer=saved,
        what=what,
    )


def kind_of(cfg: AnyModelConfig, run: Mapping[str, Any]) -> str:
    """Describes a model as 'llama', 'qwen3 (llama layout)' or 'llama with the settings of qwen3'.

    The second form is for converted models, the third for settings that only another Hugging Face family supports.
    """
    if converted := (run.get("converted") or {}).get("model_type"):
        return converted if converted == cfg.name else f"{converted} ({cfg.name} layout)"
    with contextlib.suppress(BadInput):  # no family has these settings
        if (nearest := family_for(cfg).model_type) != cfg.name:
            return f"{cfg.name} with the settings of {nearest}"
    return cfg.name


def tokenizer_of(model: LoadedModel) -> SavedTokenizer:
    """Returns the model's tokenizer. Raises BadInput for a model without tokenizer."""
    if model.saved_tokenizer is not None:
        return model.saved_tokenizer
    workdir = paths.as_path(model.path).parent.parent
    fix = f"put its file into {workdir}/tokenizer/"
    if model.run.get("converted"):
        fix = "convert it again from a folder with the tokenizer's files"
    raise BadInput(
        f"{workdir} does not record the model's tokenizer; set --tokenizer=FILE (a tokenizer.json or .model), or "
        f"--tokenizer=bytes, or {fix}; the Python API also accepts token ids"
    )


def stop_ids_of(model: LoadedModel) -> tuple[int, ...]:
    """Returns the token ids that end a text. A converted model without a tokenizer uses its eos_token_id."""
    if model.saved_tokenizer is not None:
        return model.saved_tokenizer.stop_ids
    eos = ((model.run.get("converted") or {}).get("generation") or {}).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    return tuple(token_id for token_id in ids if isinstance(token_id, int))


def read_model_config(source: Any, compute_dtype: str | None) -> AnyModelConfig:
    """Returns the model's recorded config, with settings of the training machine reset."""
    recorded = source.record["run"].get("config")
    if recorded is None:  # written by an older version, or another program
        recorded = paths.read_json(source.checkpoints.directory.parent / "config.json")["config"]
    values = dict(recorded["model"]) | {"attention": "auto", "remat": "none", "remat_save": [], "remat_offload": []}
    if compute_dtype is not None:
        values["compute_dtype"] = compute_dtype
    return schema.convert(values, AnyModelConfig, "model")


def restore_params(source: Any, sharded: ShardedModel, what: str, named: str) -> Any:
    """Restores the parameters of a step in their saved dtypes. Raises the same errors as open_model()."""
    checkpoints, step, leaves = source.checkpoints, source.step, source.record["leaves"]
    saved_names = weight_leaves(leaves, what)
    if not saved_names:
        has = sorted({name.partition("/")[0] for name in leaves})
        raise BadInput(f"{named}: {checkpoints.directory / str(step)} has no {what!r}, only {', '.join(has)}")
    abstract, shardings = {}, named_leaves(sharded.shardings)
    for name, leaf in named_leaves(sharded.shapes).items():
        saved = saved_names.get(name, f"{what}/{name}")  # restore() reports all missing names
        dtype = jnp.dtype(leaves[saved][1]) if saved in leaves else leaf.dtype
        abstract[saved] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=shardings[name])
    arrays = checkpoints.restore(step, abstract, partial=True)
    return jax.tree.unflatten(jax.tree.structure(sharded.shapes), [arrays[name] for name in abstract])


def at_step(model: LoadedModel, step: int, named: str = "--workdir") -> LoadedModel:
    """Returns the model with another step's parameters. Reuses compiled programs. See open_model() for errors."""
    source = open_source(str(paths.as_path(model.path).parent), wanted=step, named=named)
    params = restore_params(source, model.sharded, model.what, named)
    return dataclasses.replace(model, params=params, step=source.step, path=str(source), run=source.record["run"])


def make_generator(model: LoadedModel, *, batch: int, longest: int, say: Say = silent) -> Generator:
    """Returns a generator for up to `batch` prompts at a time, which is compiled on first use.

    longest: maximum number of tokens of a prompt and its continuation. say: function that logs compilations. Raises
    BadInput if the model does not generate text, or `longest` exceeds its maximum.
    """
    num_ids = model.tokenizer.vocab_size if model.tokenizer is not None else None
    return Generator(Engine(model.sharded, batch=batch, longest=longest, num_ids=num_ids, say=say), model.params)
