"""PEFT LoRA adapters: merged into their base model, loaded beside it, or exported from a run.

PEFT has A [rank, in] and B [out, rank] of a matrix; ours are their transposes, over the same axes as the matrix.
Where one matrix of theirs is several of ours (GPT-2's queries, keys and values) its A serves each of these, and those
of ours go out side by side, in as many times the rank.
"""

import collections
import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.checkpoint.storage_errors import stop_if_unreachable
from jaxscale.interop import adapter_config, hf_checkpoint
from jaxscale.interop.adapter_config import AdapterConfig
from jaxscale.interop.config import HUB_NAME
from jaxscale.interop.families import Family, TensorPair, some, tensors
from jaxscale.interop.families.family import matches_any
from jaxscale.interop.hf_checkpoint import PICKLED, read_object
from jaxscale.interop.ranges import look_at, names_in
from jaxscale.interop.safetensors import Tensor, read_header, same_bytes
from jaxscale.models import AnyModelConfig
from jaxscale.models.config import LoraConfig
from jaxscale.models.lora import A, B
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

WEIGHTS = "adapter_model.safetensors"
OUTER = "base_model.model."  # what PEFT puts before the names of a model
OF_A, OF_B, OF_BASE = ".lora_A.weight", ".lora_B.weight", ".base_layer.weight"
HEAD = "lm_head"


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A folder of PEFT's."""

    folder: Any
    config: AdapterConfig
    tensors: Mapping[str, Tensor]
    files: dict[str, int]

    @property
    def identity(self) -> str:
        """sha256 of what it says and of where its tensors lie."""
        located = [[t.name, t.file.name, t.file.size, t.file.version, t.start] for t in self.tensors.values()]
        return hashlib.sha256(repr((self.config, sorted(located))).encode()).hexdigest()


def open_adapter(name: str) -> Adapter | None:
    """The adapter in a folder; None if it holds none. Raises BadInput for one that cannot be read here."""
    folder = paths.as_path(name)
    files = stop_if_unreachable(lambda: names_in(folder), folder)
    if adapter_config.FILE not in files:
        return None
    config = adapter_config.read(read_object(folder, adapter_config.FILE, files))
    if WEIGHTS not in files:
        pickled = next((file for file in files if file.startswith("adapter_model") and file.endswith(PICKLED)), None)
        why = f"{pickled} is pickled, and never read here: save it again with a newer PEFT" if pickled else "fetch it"
        raise BadInput(f"--from={name} has no {WEIGHTS}; {why}")
    return Adapter(folder, config, read_header(stop_if_unreachable(lambda: look_at(folder / WEIGHTS), folder)), files)


def adapted(adapter: Adapter, family: Family, cfg: AnyModelConfig, base: Mapping[str, Tensor]) -> dict[str, TensorPair]:
    """{module: the matrix that it is} of all modules with an adapter, by the names that PEFT gives them.

    Args: base: the model's tensors; PEFT repeats a head that has an adapter, and it must be the same one.
    Raises BadInput for tensors that are no A and B of a matrix of the model, for ranks that are not those of the
    config, and for modules that the config names and that have none, or the other way round.
    """
    names = set(adapter.tensors)
    attempts = [matrices(family, cfg, base) for base in family.bases]
    ours = max(attempts, key=lambda found: sum(f"{OUTER}{module}{OF_A}" in names for module in found))
    found = {module: pair for module, pair in ours.items() if f"{OUTER}{module}{OF_A}" in names}
    known = {f"{OUTER}{module}{ending}" for module in found for ending in (OF_A, OF_B)}
    where = adapter.folder / WEIGHTS
    for module, name in ((module, f"{OUTER}{module}{OF_BASE}") for module in found):
        if name in names and module == HEAD and not same_bytes(base[f"{HEAD}.weight"], adapter.tensors[name]):
            raise BadInput(f"{where}: {name} is another matrix than {HEAD}.weight of the base; is it of another model?")
        known |= {name} if module == HEAD else set()
    module_of = lambda name: name.removeprefix(OUTER).removesuffix(OF_A).removesuffix(OF_B)
    others = {name for name in names - known if not matches_any(f"{module_of(name)}.weight", family.left_out)}
    if missing := sorted(name for name in known - names if not name.endswith(OF_BASE)):
        raise BadInput(f"{where} has no {some(missing)}; fetch it again")
    if others:
        raise BadInput(
            f"{where} has {some(sorted(others))}, which are no LoRA matrices of a {family.model_type}; if PEFT reads "
            "it, merge it there with merge_and_unload"
        )
    for module in ours:
        if (module in found) != adapter.config.has(module):
            said = "has tensors of" if module in found else "has no tensors of"
            raise BadInput(f"{where} {said} {module}, and target_modules in {adapter_config.FILE} says otherwise")
    if not found:
        raise BadInput(f"{where} holds no adapter of a matrix")
    for module, pair in found.items():
        rank, outs, ins = adapter.config.rank_of(module), *out_in(pair)
        for ending, shape in ((OF_A, (rank, ins)), (OF_B, (outs, rank))):
            if (theirs := adapter.tensors[f"{OUTER}{module}{ending}"].shape) != shape:
                raise BadInput(
                    f"{where}: {module}{ending} has shape {list(theirs)}, and by {adapter_config.FILE} and the base "
                    f"model it is {list(shape)}; is it the adapter of another model?"
                )
    return found


def matrices(family: Family, cfg: AnyModelConfig, base: str) -> dict[str, TensorPair]:
    """{module: its matrix}, lookup tables left out."""
    pairs = tensors(family, cfg, base)
    return {
        pair.theirs.removesuffix(".weight"): pair
        for pair in pairs
        if pair.row.inputs and pair.theirs.endswith(".weight") and "embedding" not in pair.ours[0]
    }


def out_in(pair: TensorPair) -> tuple[int, int]:
    """Outputs and inputs of a matrix."""
    first, last = pair.their_shape
    return (first, last) if pair.row.turned else (last, first)


@dataclasses.dataclass(frozen=True)
class Merged(Tensor):
    """A matrix with its adapter added, in float32."""

    a: Tensor
    b: Tensor
    scale: float
    turned: bool

    def read(self) -> np.ndarray:
        """W + scale B A, summed in float64 and rounded once, some rows at a time."""
        merged, a, b = super().read().astype(np.float32), self.a.read(), self.b.read()
        wide = merged if self.turned else merged.T  # [out, in]
        a, b = a.astype(np.float64), b.astype(np.float64)
        rows = max(1, (8 << 20) // max(1, a.shape[1]))
        for row in range(0, len(wide), rows):
            wide[row : row + rows] += self.scale * (b[row : row + rows] @ a)
        return merged


def merged_tensors(
    adapter: Adapter, found: Mapping[str, TensorPair], matched: Sequence[TensorPair], base: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of the base model, those with an adapter as Merged."""
    of_leaf = {(pair.ours, pair.place): module for module, pair in found.items()}
    merged = dict(base)
    for pair in matched:
        if module := of_leaf.get((pair.ours, pair.place)):
            a, b = (adapter.tensors[f"{OUTER}{module}{ending}"] for ending in (OF_A, OF_B))
            fields = {field.name: getattr(merged[pair.theirs], field.name) for field in dataclasses.fields(Tensor)}
            merged[pair.theirs] = Merged(
                **fields, a=a, b=b, scale=adapter.config.scale_of(module), turned=pair.row.turned
            )
    return merged


@dataclasses.dataclass(frozen=True)
class SideBySide(TensorPair):
    """A or B of one matrix of theirs that is several of ours: each has its own rows of A, and its columns of B."""

    def to_ours(self, tensor: np.ndarray) -> tuple[np.ndarray, ...]:
        """A for each of ours."""
        self.check(self.theirs, tensor.shape, self.their_shape)
        return tuple(tensor.T.reshape(shape) for shape in self.our_shapes)

    def to_theirs(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """All A, one below the other; or all B, in blocks along the diagonal."""
        if self.row.theirs == OF_A:
            return np.concatenate([leaf.reshape(-1, leaf.shape[-1]).T for leaf in leaves])
        out = np.zeros(self.their_shape, leaves[0].dtype)
        row = column = 0
        for leaf in (leaf.reshape(leaf.shape[0], -1).T for leaf in leaves):
            out[row : row + leaf.shape[0], column : column + leaf.shape[1]] = leaf
            row, column = row + leaf.shape[0], column + leaf.shape[1]
        return out


def adapter_pairs(module: str, pair: TensorPair, rank: int, out: bool = False) -> list[TensorPair]:
    """A and B of a matrix as tensors of PEFT's file. Args: out: written, where A of several of ours stand in a row."""
    count, (outs, ins) = pair.row.inputs, out_in(pair)
    several = len(pair.ours) > 1
    theirs = rank * len(pair.ours) if several and out else rank
    kinds = ((OF_A, A, (theirs, ins), several), (OF_B, B, (outs, theirs), several and out))
    made = []
    for ending, own, their_shape, beside in kinds:
        names = tuple(f"{name}{own}" for name in pair.ours)
        shapes = [(*shape[:count], rank) if own == A else (rank, *shape[count:]) for shape in pair.our_shapes]
        row = dataclasses.replace(pair.row, ours=names, theirs=ending, inputs=count if own == A else 1, turned=True)
        kind = SideBySide if beside else TensorPair
        in_pairs = pair.neighbours if own == B else 0  # of outputs
        name = f"{OUTER}{module}{ending}"
        made.append(kind(names, pair.layer, tuple(shapes), name, their_shape, row, neighbours=in_pairs))
    return made


def start_of_run(
    adapter: Adapter, found: Mapping[str, TensorPair], cfg: AnyModelConfig
) -> tuple[LoraConfig, list[TensorPair]]:
    """The settings and the tensors with which a LoRA run goes on from an adapter.

    Raises BadInput for ranks or scales that differ among matrices, and for layers without one.
    """
    scales = {(adapter.config.rank_of(module), adapter.config.scale_of(module)) for module in found}
    way_out = "a run with adapters has one rank and scale, and adapts a matrix in all layers; merge it instead"
    if len(scales) > 1:
        raise BadInput(f"--adapter: {adapter.folder} has several ranks or scales, and {way_out}")
    ((rank, scale),) = scales
    layers = collections.Counter(without_layer(pair.ours[0]) for pair in found.values())
    for name, number in layers.items():
        if any(pair.expert is not None for pair in found.values() if without_layer(pair.ours[0]) == name):
            raise BadInput(f"--adapter: {adapter.folder} adapts experts, and is not kept beside them; merge it instead")
        if not name.startswith("blocks/"):
            raise BadInput(f"--adapter: {adapter.folder} adapts {name}, and a run adapts the blocks; merge it instead")
        if number != cfg.num_layers:
            raise BadInput(
                f"--adapter: {adapter.folder} adapts {name} in {number} of {cfg.num_layers} layers, and {way_out}"
            )
    pairs = [one for module, pair in found.items() for one in adapter_pairs(module, pair, rank)]
    names = sorted({name for pair in found.values() for name in map(without_layer, pair.ours)})
    targets = tuple(re.escape(name.removeprefix("blocks/").replace("/", ".")) + "$" for name in names)
    return LoraConfig(rank=rank, alpha=scale * rank, targets=targets), pairs


def without_layer(name: str) -> str:
    """'blocks/attention/wq' of 'blocks/3/attention/wq'."""
    return re.sub(r"^blocks/\d+/", "blocks/", name)


def of_run(
    family: Family, cfg: AnyModelConfig, lora: LoraConfig, has: Callable[[str], bool], base: str | None
) -> tuple[list[TensorPair], dict[str, Any]]:
    """(tensors, adapter_config.json) of a run with adapters. Args: has: whether there is a leaf of this name.

    Raises BadInput where one matrix of theirs is several of ours, and only some of these have an adapter.
    """
    pairs, joint, turned = [], {}, True
    for module, pair in matrices(family, cfg, family.bases[0]).items():
        own = [name for name in pair.ours if has(name + A)]
        if not own:
            continue
        if pair.expert is not None:
            raise BadInput(
                f"{own[0]} is an adapter of experts, which are not exported alone: how PEFT names those of joined "
                "experts hangs on its version; merge it with jaxscale ckpt merge_lora, and export that"
            )
        if len(own) < len(pair.ours):
            raise BadInput(f"{own[0]} has an adapter and not all of {module} has, which PEFT cannot say; merge it")
        pairs += adapter_pairs(module, pair, lora.rank, out=True)
        joint[".".join(module.split(".")[-2:])] = len(pair.ours)
        turned = pair.row.turned
    if pairs and len(cfg.layer_stacks) > 1:
        raise BadInput(
            "the first layers, without experts, have no adapters, which PEFT is not told here; merge them with "
            "jaxscale ckpt merge_lora, and export that"
        )
    return pairs, adapter_config.write(lora.rank, lora.alpha, list(joint), base, joint, turned)


def where_base_is(adapter: Adapter, given: str | None) -> str:
    """Returns the folder of an adapter's base model.

    Raises BadInput where it is not known or not local, and where transformers 5 reads another one than PEFT does.
    """
    base = given or adapter.config.base
    if base is None:
        raise BadInput(f"{adapter.folder} is an adapter and does not say of which model; give --base=FOLDER")
    model = next((name for name in (hf_checkpoint.WEIGHTS, hf_checkpoint.INDEX) if name in adapter.files), None)
    if given is None and model and hf_checkpoint.CONFIG in adapter.files and not is_folder_of(adapter, base):
        raise BadInput(
            f"the adapter in {adapter.folder} is for {base[:200]}, and there is also {model} in its folder: "
            "transformers 5 reads it with the one, transformers 4 and PEFT with the other; give --base=FOLDER"
        )
    if given is None and (paths.is_remote(base) or not paths.as_path(base).is_dir()):
        fetched = f"--base={base[:200]}, which fetches it from the Hub, or " if HUB_NAME.fullmatch(base) else ""
        raise BadInput(
            f"{adapter.folder} is an adapter of {base[:200]}, which is no folder here; give {fetched}--base=FOLDER"
        )
    return base


def is_folder_of(adapter: Adapter, base: str) -> bool:
    """Returns True if the base model is in the adapter's own folder."""
    return paths.absolute(base) == paths.absolute(adapter.folder)
