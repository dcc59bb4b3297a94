"""Exports a checkpoint as a folder that transformers loads, with one tensor in memory at a time.

config.json is written last: a folder without one is not finished. What is read is compared with the fingerprints that
were taken when it was saved, before that.
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
from jaxscale.checkpoint.folders import size_and_md5
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.checkpoint.record import digest, weight_leaves
from jaxscale.checkpoint.restore import newest_readable_step
from jaxscale.checkpoint.storage_errors import is_storage_error, short_reason, stop_if_unwritable
from jaxscale.interop import adapter_config, adapters, families
from jaxscale.interop.chunking import array_shapes, in_order
from jaxscale.interop.families import TensorPair
from jaxscale.interop.families.rope import LONGEST, frozen
from jaxscale.interop.hf_checkpoint import CONFIG, INDEX, WEIGHTS
from jaxscale.interop.journal import Journal, open_journal
from jaxscale.interop.layer_reader import Leaves
from jaxscale.interop.safetensors import DTYPES, encode_header
from jaxscale.models import AnyModelConfig
from jaxscale.models.config import LoraConfig
from jaxscale.models.mup_config import folding_factor, without_mup
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop, print_stderr
from jaxscale.system.faults import crash_point

JOURNAL = ".converting.json"
MANY = "model-{:05d}-of-{:05d}.safetensors"  # as transformers names them
BLOCK_BYTES = 32 << 20  # of a tensor, put into their order at one time
FORMATS = {"bfloat16": DTYPES["BF16"], "float32": DTYPES["F32"]}
Format = Literal["bfloat16", "float32"]
What = Literal["params", "ema"]
KEEPS = dict(params="", ema="; train.ema.decay keeps one")


@dataclasses.dataclass(frozen=True)
class Source:
    """The step of a run that is exported."""

    folder: Any  # of the step
    record: Mapping[str, Any]
    cfg: AnyModelConfig
    family: families.Family
    pairs: tuple[TensorPair, ...]
    what: What
    adapter: Mapping[str, Any] | None = None  # adapter_config.json, where adapters are exported and nothing else
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of our leaves that go out multiplied

    @property
    def run(self) -> Mapping[str, Any]:
        """The record of the run next to the arrays."""
        return self.record["run"]

    @functools.cached_property
    def leaves(self) -> dict[str, str]:
        """{parameter: leaf of the checkpoint}: {'w': 'params/w'}."""
        return weight_leaves(self.record["leaves"], self.what)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of the export."""

    name: str
    pairs: tuple[TensorPair, ...]
    header: bytes
    num_bytes: int  # of the whole file


def open_step(
    checkpoints: Checkpoints, step: int | None, what: What = "params", adapter: bool = False, base: str | None = None
) -> tuple[int, Source]:
    """(the step, what it holds); None: the newest.

    Args: adapter: the adapters of a LoRA run alone. base: the model that they are for; none: what the run began with.
    Raises: BadInput for what no family has a word for.
    """
    steps = checkpoints.all_steps()
    if not steps:
        raise BadInput(f"{checkpoints.directory.parent} holds no checkpoint; give the work folder of a run")
    if step is not None and step not in steps:
        raise BadInput(f"--step={step}: there is no such step; there are {', '.join(map(str, steps))}")
    step = newest_readable_step(checkpoints, print_stderr) if step is None else step
    assert step is not None, "with steps, newest_readable_step returns one or raises"
    record = checkpoints.read_record(step)
    checkpoints.log_changed_files(step, print_stderr, small=True)
    values = record["run"].get("config", {}).get("model")
    if values is None:
        raise BadInput(f"step {step} does not say which model it is of; it was not saved by a run")
    lora = schema.convert(record["run"]["config"].get("lora") or {}, LoraConfig, "lora")
    if lora.on and not adapter:
        raise BadInput(
            f"step {step} has its adapters beside its weights, and other tools would read the weights alone; merge "
            f"them with jaxscale ckpt merge_lora --workdir={checkpoints.directory.parent} --to=FOLDER, and export "
            "that, or --adapter exports the adapters alone, for PEFT"
        )
    cfg = frozen(schema.convert(values, AnyModelConfig, "model"))
    origin = origin_of(record["run"])
    trained, cfg = cfg, without_mup(cfg)  # no family has muP: its factors go into the weights
    family = families.family_for(cfg, origin.get("model_type"))
    folder = checkpoints.directory / str(step)
    if adapter:
        if not lora.on:
            raise BadInput(
                f"--adapter: step {step} has no adapters; leave it out, or name a run with lora.rank above 0"
            )
        has = weight_leaves(record["leaves"], what).__contains__
        pairs, config = adapters.of_run(family, cfg, lora, has, base or origin.get("from"))
        if not pairs:
            raise BadInput(f"step {step} has no {what} of its adapters{KEEPS[what]}")
        return step, Source(folder, record, cfg, family, tuple(pairs), what, config)
    pairs = tuple(families.tensors(family, cfg))
    check_leaves(record, array_shapes(pairs) | families.unsaid(cfg), what, step)
    factors = {name: folding_factor(trained, name) for pair in pairs for name in pair.ours}
    return step, Source(folder, record, cfg, family, pairs, what, factors=factors)


def origin_of(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is recorded of the Hugging Face model that a run's weights come from: model_type, kept; {} where of none."""
    origins = (run.get("converted") or {}, *(run.get("ancestry") or ()))
    return next((one for one in origins if "model_type" in one or "kept" in one), {})


def check_leaves(record: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], what: What, step: int) -> None:
    """Raises BadInput unless the step has every array, with the shape that its config asks for, and no other."""
    leaves, named = record["leaves"], weight_leaves(record["leaves"], what)
    if not named:
        raise BadInput(f"step {step} has no {what}{KEEPS[what]}")
    for name, shape in shapes.items():
        saved = leaves.get(named.get(name))
        if saved is None or saved[:2] != [list(shape), "float32"]:
            there = "missing" if saved is None else f"{saved[1]}{saved[0]}"
            raise BadInput(f"step {step}: {what}/{name} is {there}, and by its config it is float32{list(shape)}")
    if extra := sorted(named.keys() - shapes.keys()):
        raise BadInput(f"step {step} has {named[extra[0]]}, for which its config has no place")


def export_step(
    source: Source,
    to: Any,
    *,
    dtype: Format,
    shard_bytes: int,
    texts: Mapping[str, bytes],
    config: Mapping[str, Any],
    on_bytes: Callable[[int, int, int], None] = lambda done, total, kept: None,
    send: Callable[[Any], str] = lambda folder: "",
) -> dict[str, Any]:
    """Writes the folder and returns what was written; kept_bytes of it by an earlier, killed export.

    Args: texts: files of the tokenizer and the like. config: of config.json. send: takes the folder once all is in it,
    and gives an address; what it raises leaves the journal, so that the same command, run again, comes to it again.

    Raises: BadInput if the folder holds something else, Stop (CHECKPOINT_CORRUPT) naming an array that is not what
    was saved, (STORAGE) if the folder cannot be written.
    """
    number_type = FORMATS[dtype]
    names = (WEIGHTS, CONFIG) if source.adapter is None else (adapters.WEIGHTS, adapter_config.FILE)
    shards = plan_shards(source.pairs, number_type, shard_bytes, names[0])
    folder, journal = prepare_folder(to, source, shards, dtype)
    with contextlib.closing(journal):
        total, done, kept = sum(shard.num_bytes for shard in shards), 0, 0
        with reading(source, "its index"):
            leaves = Leaves(source.folder)
        for shard in shards:
            noted = journal.done.get(shard.name)
            if noted and size_and_md5(folder / shard.name) == tuple(noted["mark"]):
                kept += shard.num_bytes
                done += shard.num_bytes
                continue
            report = lambda now, before=done, kept=kept: on_bytes(before + now, total, kept)
            write = functools.partial(write_shard, folder / shard.name, shard, source, leaves, number_type, report)
            mark, sums = stop_if_unwritable(write, folder)
            journal.note(shard.name, {"mark": mark, "sums": sums})
            stop_if_unwritable(journal.settle, folder)
            crash_point("export/shard")
            done += shard.num_bytes
        check_sums(source, journal)
        files = dict(texts)
        if len(shards) > 1:
            files[INDEX] = as_json(index_of(shards))
        for name, content in files.items():
            stop_if_unwritable(
                lambda name=name, content=content: paths.write_bytes_atomic(folder / name, content), folder
            )
        crash_point("export/config")
        stop_if_unwritable(lambda: paths.write_bytes_atomic(folder / names[1], as_json(config)), folder)
        pushed = send(folder)
        journal.remove()
        counts = dict(num_tensors=len(source.pairs), num_files=len(shards), num_bytes=total)
        return counts | dict(kept_bytes=kept, pushed=pushed)


def prepare_folder(to: Any, source: Source, shards: Sequence[Shard], dtype: str) -> tuple[Any, Journal]:
    """(the folder, its journal). Raises BadInput if anything but this export is in the folder."""
    folder = paths.absolute(to)
    plan = [[shard.name, shard.num_bytes, [pair.theirs for pair in shard.pairs]] for shard in shards]
    identity = digest([source.record["sha256"], source.what, dtype, plan])
    journal, resumed = open_journal(folder, JOURNAL, identity, f"--to={to}")
    if resumed:
        paths.remove_temporaries(folder, ("*",))
    return folder, journal


@contextlib.contextmanager
def reading(source: Source, what: str) -> Iterator[None]:
    """Raises Stop (CHECKPOINT_CORRUPT) if an array or index cannot be read inside, (STORAGE) if it is out of reach."""
    try:
        yield
    except Exception as error:  # whatever TensorStore raises for corrupted bytes
        code = Exit.STORAGE if is_storage_error(error) else Exit.CHECKPOINT_CORRUPT
        reason = f"{what} cannot be read: {short_reason(error)}; export another step"
        raise Stop(code, f"{source.folder}: {reason}") from None


def write_shard(
    path: Any, shard: Shard, source: Source, leaves: Leaves, dtype: np.dtype, on_bytes: Callable[[int], None]
) -> tuple[list, dict[str, int]]:
    """([bytes, md5] of the file, {leaf: what its layers in this file add to its fingerprint})."""
    sums: dict[str, int] = {}
    with paths.growing_file(path, shard.num_bytes) as file:
        file.write(shard.header)
        for pair in shard.pairs:
            write_tensor(file, pair, source, leaves, dtype, sums)
            on_bytes(file.num_bytes)
    return [file.num_bytes, file.md5.hexdigest()], sums


def write_tensor(
    file: Any, pair: TensorPair, source: Source, leaves: Leaves, dtype: np.dtype, sums: dict[str, int]
) -> None:
    """Writes one tensor, and gives it up on return: the only large thing in memory. Args: sums: are added to."""
    parts = []
    for name in pair.ours:
        factor = source.factors.get(name, 1.0)
        with reading(source, source.leaves[name]):
            part, mark = leaves.read(source.leaves[name], pair.place, dtype if factor == 1.0 else np.dtype(np.float32))
        parts.append(part if factor == 1.0 else (part * np.float32(factor)).astype(dtype))
        sums[name] = (sums.get(name, 0) + mark) % 2**32
    tensor = pair.to_theirs(parts)
    assert tensor.shape == pair.their_shape and tensor.dtype == dtype, f"{pair.theirs} came out as another array"
    rows = max(1, BLOCK_BYTES // max(1, tensor[:1].nbytes)) if tensor.ndim else 1
    for row in range(0, len(tensor) if tensor.ndim else 1, rows):
        block = in_order(tensor[row : row + rows] if tensor.ndim else tensor)
        file.write(block.reshape(-1).view(np.uint8))


def check_sums(source: Source, journal: Journal) -> None:
    """Raises Stop (CHECKPOINT_CORRUPT) naming an array of which one bit is not what was saved."""
    for name, mark in journal.fingerprints("sums").items():
        if mark != source.record["leaves"][source.leaves[name]][2]:
            raise Stop(
                Exit.CHECKPOINT_CORRUPT,
                f"{source.folder}: the bits of {source.leaves[name]} are not those that were saved; the export in "
                f"{journal.path.parent} is not finished: remove it, and export another step",
            )


def config_of(source: Source, dtype: str, end_ids: Mapping[str, Any]) -> dict[str, Any]:
    """config.json: the model's, the keys that came with it, and the ids of special tokens.

    Args: end_ids: bos_token_id and eos_token_id of the tokenizer that goes along with what was trained here.
    max_position_embeddings are the tokens of the rows it was trained on, or those of the model it began with, where
    RoPE's scaling does not say them.
    """
    kept = dict((source.run.get("converted") or {}).get("kept") or {})
    if not kept:
        origin = dict(origin_of(source.run).get("kept") or {})
        kept = origin | {name: value for name, value in end_ids.items() if value is not None}
        longest = source.run["config"].get("seq_len") or 0, kept.pop(LONGEST, None) or 0
        if not {LONGEST, "n_positions"} & source.family.write_config(source.cfg).keys():
            kept[LONGEST] = max(longest)
    kept.pop("dtype", None)
    return families.write(source.family, source.cfg, kept | {"torch_dtype": dtype})


def as_json(value: Any) -> bytes:
    """The text of a file, as transformers indents it."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def is_finished(folder: Any) -> bool:
    """True if the folder holds an export that came to its end."""
    return any((folder / name).exists() for name in (CONFIG, adapter_config.FILE)) and not (folder / JOURNAL).exists()


def plan_shards(pairs: Sequence[TensorPair], dtype: np.dtype, shard_bytes: int, single: str = WEIGHTS) -> list[Shard]:
    """The files: tensors in order, up to shard_bytes in each; a larger tensor has a file of its own.

    Args: single: the name of a file that holds all.
    """
    groups: list[list[TensorPair]] = [[]]
    filled = 0
    for pair in pairs:
        size = tensor_bytes(pair, dtype)
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(pair)
        filled += size
    shards = []
    for number, group in enumerate(groups, 1):
        name = single if len(groups) == 1 else MANY.format(number, len(groups))
        header = encode_header({pair.theirs: (dtype, pair.their_shape) for pair in group})
        shards.append(Shard(name, tuple(group), header, len(header) + sum(tensor_bytes(pair, dtype) for pair in group)))
    return shards


def tensor_bytes(pair: TensorPair, dtype: np.dtype) -> int:
    """Returns the bytes of one tensor of theirs."""
    return math.prod(pair.their_shape) * dtype.itemsize


def index_of(shards: Sequence[Shard]) -> dict[str, Any]:
    """Returns the content of model.safetensors.index.json."""
    total = sum(shard.num_bytes - len(shard.header) for shard in shards)
    places = {pair.theirs: shard.name for shard in shards for pair in shard.pairs}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
