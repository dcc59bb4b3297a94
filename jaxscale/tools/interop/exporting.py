"""Export of a checkpoint to a folder that transformers can load, with one tensor in memory at a time.

The arrays are compared with the fingerprints from the time when they were saved. config.json is written last, so a
folder without config.json is unfinished.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxscale import schema
from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.lora_mup_config import LoraConfig
from jaxscale.runtime.checkpoint.conversions import folding_factor, without_mup
from jaxscale.runtime.checkpoint.folders import size_and_md5
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.periodic_export import JOURNAL
from jaxscale.runtime.checkpoint.record import digest, weight_leaves
from jaxscale.runtime.checkpoint.restore import newest_readable_step
from jaxscale.runtime.checkpoint.storage_errors import is_storage_error, short_reason, stop_if_unwritable
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop, print_stderr
from jaxscale.system.faults import crash_point
from jaxscale.tools.interop import adapter_config, adapters, families
from jaxscale.tools.interop.chunking import array_shapes, contiguous
from jaxscale.tools.interop.families import TensorPair
from jaxscale.tools.interop.families.settings import MAX_POSITIONS, with_static_rope
from jaxscale.tools.interop.hf_checkpoint import CONFIG, INDEX, WEIGHTS
from jaxscale.tools.interop.importing import OnBytes
from jaxscale.tools.interop.journal import Journal, open_journal
from jaxscale.tools.interop.layer_reader import LayerReader
from jaxscale.tools.interop.safetensors import DTYPES, encode_header

SHARD_NAME = "model-{:05d}-of-{:05d}.safetensors"  # file names of transformers
BLOCK_BYTES = 32 << 20  # part of a tensor that is made contiguous at a time
FORMATS = {"bfloat16": DTYPES["BF16"], "float32": DTYPES["F32"]}
Format = Literal["bfloat16", "float32"]
WeightsName = Literal["params", "ema"]
MISSING_HINTS = dict(params="", ema="; set train.ema.decay to train with an EMA")


@dataclasses.dataclass(frozen=True)
class ExportSource:
    """A step of a run to export."""

    folder: Any  # folder of the step
    record: Mapping[str, Any]
    cfg: AnyModelConfig
    family: families.HfFamily
    pairs: tuple[TensorPair, ...]
    what: WeightsName
    adapter: Mapping[str, Any] | None = None  # adapter_config.json, if only adapters are exported
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)  # {leaf: muP factor folded into the leaf}

    @property
    def run(self) -> Mapping[str, Any]:
        """The "run" entry of the step's metadata."""
        return self.record["run"]

    @functools.cached_property
    def leaves(self) -> dict[str, str]:
        """Names of leaves in the checkpoint by parameter, such as {'w': 'params/w'}."""
        return weight_leaves(self.record["leaves"], self.what)


@dataclasses.dataclass(frozen=True)
class ExportFile:
    """A file of the export."""

    name: str
    pairs: tuple[TensorPair, ...]
    header: bytes
    num_bytes: int  # size of the whole file


def open_step(
    checkpoints: Checkpoints,
    step: int | None,
    what: WeightsName = "params",
    adapter: bool = False,
    base: str | None = None,
) -> tuple[int, ExportSource]:
    """Returns (step, source). step: None for the newest. adapter: export only LoRA adapters, of the model `base`."""
    steps = checkpoints.all_steps()
    if not steps:
        raise BadInput(f"{checkpoints.directory.parent} has no checkpoint; give the work folder of a run")
    if step is not None and step not in steps:
        raise BadInput(f"--step={step} does not exist; available steps: {', '.join(map(str, steps))}")
    step = newest_readable_step(checkpoints, print_stderr) if step is None else step
    assert step is not None, "with steps, newest_readable_step returns one or raises"
    record = checkpoints.read_record(step)
    checkpoints.log_changed_files(step, print_stderr, small=True)
    values = record["run"].get("config", {}).get("model")
    if values is None:
        raise BadInput(f"step {step} has no model config, so it is not from training; export another step")
    lora = schema.convert(record["run"]["config"].get("lora") or {}, LoraConfig, "lora")
    if lora.on and not adapter:
        raise BadInput(
            f"step {step} has LoRA adapters, which other tools would ignore; merge the adapters "
            f"with jaxscale ckpt merge_lora --workdir={checkpoints.directory.parent} --to=FOLDER and export the "
            "result, or export only the adapters for PEFT with --adapter"
        )
    cfg = with_static_rope(schema.convert(values, AnyModelConfig, "model"))
    origin = hf_origin(record["run"])
    trained, cfg = cfg, without_mup(cfg)  # no family supports muP, so its factors are folded into the weights
    family = families.family_for(cfg, origin.get("model_type"))
    folder = checkpoints.directory / str(step)
    if adapter:
        if not lora.on:
            fix = "omit --adapter, or export a run with lora.rank above 0"
            raise BadInput(f"step {step} has no LoRA adapters; {fix}")
        has = weight_leaves(record["leaves"], what).__contains__
        pairs, config = adapters.adapter_of_run(family, cfg, lora, has, base or origin.get("from"))
        if not pairs:
            raise BadInput(f"step {step} has no {what} for its adapters{MISSING_HINTS[what]}")
        return step, ExportSource(folder, record, cfg, family, tuple(pairs), what, config)
    pairs = tuple(families.tensors(family, cfg))
    check_leaves(record, array_shapes(pairs) | families.untracked_leaves(cfg), what, step)
    factors = {name: folding_factor(trained, name) for pair in pairs for name in pair.leaves}
    return step, ExportSource(folder, record, cfg, family, pairs, what, factors=factors)


def hf_origin(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the record of the Hugging Face model that a run started from (model_type, kept), or {}."""
    origins = (run.get("converted") or {}, *(run.get("ancestry") or ()))
    return next((one for one in origins if "model_type" in one or "kept" in one), {})


def check_leaves(
    record: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], what: WeightsName, step: int
) -> None:
    """Raises BadInput unless the step has exactly the arrays and shapes of its config."""
    leaves, named = record["leaves"], weight_leaves(record["leaves"], what)
    if not named:
        raise BadInput(f"step {step} has no {what}{MISSING_HINTS[what]}")
    for name, shape in shapes.items():
        saved = leaves.get(named.get(name))
        if saved is None or saved[:2] != [list(shape), "float32"]:
            found = "missing" if saved is None else f"{saved[1]}{saved[0]}"
            raise BadInput(f"step {step}: {what}/{name} is {found}, but its config requires float32{list(shape)}")
    if extra := sorted(named.keys() - shapes.keys()):
        raise BadInput(f"step {step} has {named[extra[0]]}, which its model does not have; export another step")


def export_step(
    source: ExportSource,
    to: Any,
    *,
    dtype: Format,
    shard_bytes: int,
    texts: Mapping[str, bytes],
    config: Mapping[str, Any],
    on_bytes: OnBytes,
    send: Callable[[Any], str],
) -> dict[str, Any]:
    """Writes the export and returns counts. kept_bytes: number of bytes that an earlier, killed export wrote.

    texts: tokenizer files. config: contents of config.json. send: uploads the finished folder and returns its URL. If
    `send` raises, the journal remains, so that the same command retries the upload.

    Raises BadInput if the folder has other contents, Stop (CHECKPOINT_CORRUPT) if an array differs from its
    fingerprint, and Stop (STORAGE) if the folder cannot be written.
    """
    weights, config_name = (WEIGHTS, CONFIG) if source.adapter is None else (adapters.WEIGHTS, adapter_config.FILE)
    shards, folder = plan_shards(source.pairs, FORMATS[dtype], shard_bytes, weights), paths.absolute(to)
    plan = [[shard.name, shard.num_bytes, [pair.hf_name for pair in shard.pairs]] for shard in shards]
    identity = digest([source.record["sha256"], source.what, dtype, plan])
    journal, resumed = open_journal(folder, JOURNAL, identity, f"--to={to}")
    if resumed:
        paths.remove_temporaries(folder, ("*",))
    with contextlib.closing(journal):
        resumed_bytes = write_shards(source, folder, journal, shards, FORMATS[dtype], on_bytes)
        for name, mark in journal.fingerprints("sums").items():
            if mark != source.record["leaves"][source.leaves[name]][2]:
                raise Stop(
                    Exit.CHECKPOINT_CORRUPT,
                    f"{source.folder}: {source.leaves[name]} differs from the fingerprint taken when it was saved; the "
                    f"export in {folder} is incomplete: remove it and export a different step",
                )
        files = dict(texts)
        if len(shards) > 1:
            size = sum(shard.num_bytes - len(shard.header) for shard in shards)
            weight_map = {pair.hf_name: shard.name for shard in shards for pair in shard.pairs}
            files[INDEX] = as_json({"metadata": {"total_size": size}, "weight_map": weight_map})
        for name, content in files.items():
            stop_if_unwritable(functools.partial(paths.write_bytes_atomic, folder / name, content), folder)
        crash_point("export/config")
        stop_if_unwritable(lambda: paths.write_bytes_atomic(folder / config_name, as_json(config)), folder)
        pushed = send(folder)
        journal.remove()
    counts = dict(num_tensors=len(source.pairs), num_files=len(shards), num_bytes=sum(one.num_bytes for one in shards))
    return counts | dict(kept_bytes=resumed_bytes, pushed=pushed)


def write_shards(
    source: ExportSource,
    folder: Any,
    journal: Journal,
    shards: Sequence[ExportFile],
    dtype: np.dtype,
    on_bytes: OnBytes,
) -> int:
    """Writes all files that are not in the journal. Returns the number of bytes that were already written."""
    total, done, resumed_bytes = sum(shard.num_bytes for shard in shards), 0, 0
    with reading(source, "its index"):
        leaves = LayerReader(source.folder)
    for shard in shards:
        noted = journal.done.get(shard.name)
        if noted and size_and_md5(folder / shard.name) == tuple(noted["mark"]):
            resumed_bytes += shard.num_bytes
        else:
            report = lambda now, before=done, resumed_bytes=resumed_bytes: on_bytes(before + now, total, resumed_bytes)
            write = functools.partial(write_shard, folder / shard.name, shard, source, leaves, dtype, report)
            mark, sums = stop_if_unwritable(write, folder)
            journal.pending[shard.name] = {"mark": mark, "sums": sums}
            stop_if_unwritable(journal.flush, folder)
            crash_point("export/shard")
        done += shard.num_bytes
    return resumed_bytes


@contextlib.contextmanager
def reading(source: ExportSource, what: str) -> Iterator[None]:
    """Converts read errors in a `with` block to Stop: STORAGE if the storage fails, CHECKPOINT_CORRUPT otherwise."""
    try:
        yield
    except Exception as error:  # TensorStore raises various types for corrupted bytes
        code = Exit.STORAGE if is_storage_error(error) else Exit.CHECKPOINT_CORRUPT
        reason = f"{what} cannot be read: {short_reason(error)}; export a different step"
        raise Stop(code, f"{source.folder}: {reason}") from None


def write_shard(
    path: Any,
    shard: ExportFile,
    source: ExportSource,
    leaves: LayerReader,
    dtype: np.dtype,
    on_bytes: Callable[[int], None],
) -> tuple[list, dict[str, int]]:
    """Writes one file. Returns ([bytes, md5], {leaf: fingerprint of its layers in this file})."""
    sums: dict[str, int] = {}
    with paths.growing_file(path, shard.num_bytes) as file:
        file.write(shard.header)
        for pair in shard.pairs:
            write_tensor(file, pair, source, leaves, dtype, sums)
            on_bytes(file.num_bytes)
    return [file.num_bytes, file.md5.hexdigest()], sums


def write_tensor(
    file: Any, pair: TensorPair, source: ExportSource, leaves: LayerReader, dtype: np.dtype, sums: dict[str, int]
) -> None:
    """Writes one tensor. Only this tensor is in memory. sums: partial fingerprint of each leaf, updated in place."""
    parts = []
    for name in pair.leaves:
        factor = source.factors.get(name, 1.0)
        with reading(source, source.leaves[name]):
            part, mark = leaves.read(source.leaves[name], pair.place, dtype if factor == 1.0 else np.dtype(np.float32))
        parts.append(part if factor == 1.0 else (part * np.float32(factor)).astype(dtype))
        sums[name] = (sums.get(name, 0) + mark) % 2**32
    tensor = pair.to_hf(parts)
    assert tensor.shape == pair.hf_shape and tensor.dtype == dtype, f"unexpected shape or dtype of {pair.hf_name}"
    rows = max(1, BLOCK_BYTES // max(1, tensor[:1].nbytes)) if tensor.ndim else 1
    for row in range(0, len(tensor) if tensor.ndim else 1, rows):
        block = contiguous(tensor[row : row + rows] if tensor.ndim else tensor)
        file.write(block.reshape(-1).view(np.uint8))


def hf_config(source: ExportSource, dtype: str, end_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json: keys of the model, keys of the original config.json, and the token ids in end_ids."""
    passthrough = dict((source.run.get("converted") or {}).get("kept") or {})
    if not passthrough:
        origin = dict(hf_origin(source.run).get("kept") or {})
        passthrough = origin | {name: value for name, value in end_ids.items() if value is not None}
        longest = source.run["config"].get("seq_len") or 0, passthrough.pop(MAX_POSITIONS, None) or 0
        if not {MAX_POSITIONS, "n_positions"} & source.family.write_config(source.cfg).keys():
            passthrough[MAX_POSITIONS] = max(longest)
    passthrough.pop("dtype", None)
    return families.write(source.family, source.cfg, passthrough | {"torch_dtype": dtype})


def as_json(value: Any) -> bytes:
    """Encodes JSON with the indentation of transformers."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def plan_shards(
    pairs: Sequence[TensorPair], dtype: np.dtype, shard_bytes: int, single: str = WEIGHTS
) -> list[ExportFile]:
    """Groups tensors into files of at most shard_bytes, or one larger tensor. single: file name if it is one file."""
    groups, left = [], 0  # bytes that still fit into the last group
    bytes_of = lambda pair: math.prod(pair.hf_shape) * dtype.itemsize
    for pair in pairs:
        if not groups or bytes_of(pair) > left:
            groups.append([])
            left = shard_bytes
        groups[-1].append(pair)
        left -= bytes_of(pair)
    shards = []
    for number, group in enumerate(groups, 1):
        name = single if len(groups) == 1 else SHARD_NAME.format(number, len(groups))
        header = encode_header({pair.hf_name: (dtype, pair.hf_shape) for pair in group})
        shards.append(ExportFile(name, tuple(group), header, len(header) + sum(map(bytes_of, group))))
    return shards
