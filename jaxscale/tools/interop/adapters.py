"""Import of PEFT LoRA adapters, merged into the base model or as separate leaves, and export from a run.

PEFT stores A as [rank, in] and B as [out, rank]. Our leaves are the transposes, with the axes of the weight. If one
PEFT matrix corresponds to several leaves (GPT-2's fused QKV), import copies A to each leaf. Export stacks the A of all
leaves and makes B block-diagonal, so the ranks add up.
"""

import collections
import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.lora import A, B
from jaxscale.core.models.lora_mup_config import LoraConfig
from jaxscale.runtime.checkpoint.config import HUB_NAME
from jaxscale.runtime.checkpoint.storage_errors import stop_if_unreachable
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop import adapter_config, hf_checkpoint
from jaxscale.tools.interop.adapter_config import AdapterConfig
from jaxscale.tools.interop.families import HfFamily, TensorPair, first_names, tensors
from jaxscale.tools.interop.families.family import matches_any
from jaxscale.tools.interop.hf_checkpoint import PICKLED, read_object, tensors_of
from jaxscale.tools.interop.safetensors import Tensor, list_files, same_bytes

WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # prefix of module names in PEFT
A_SUFFIX, B_SUFFIX, BASE_SUFFIX = ".lora_A.weight", ".lora_B.weight", ".base_layer.weight"
HEAD = "lm_head"


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Contents of a PEFT adapter folder."""

    folder: Any
    config: AdapterConfig
    tensors: Mapping[str, Tensor]
    files: dict[str, int]

    @property
    def identity(self) -> str:
        """SHA-256 of the config, and of the file, file version and offset of each tensor."""
        located = [[t.name, t.file.name, t.file.size, t.file.version, t.start] for t in self.tensors.values()]
        return hashlib.sha256(repr((self.config, sorted(located))).encode()).hexdigest()


def open_adapter(name: str) -> Adapter | None:
    """Opens the adapter in a folder, or returns None if there is none. Raises BadInput if it cannot be read."""
    folder = paths.as_path(name)
    files = stop_if_unreachable(lambda: list_files(folder), folder)
    if adapter_config.FILE not in files:
        return None
    config = adapter_config.read(read_object(folder, adapter_config.FILE, files))
    if WEIGHTS not in files:
        pickled = next((file for file in files if file.startswith("adapter_model") and file.endswith(PICKLED)), None)
        fix = f"{pickled} is a pickle, which is never read; save it with a newer PEFT" if pickled else "download it"
        raise BadInput(f"--from={name} has no {WEIGHTS}; {fix}")
    return Adapter(folder, config, tensors_of(folder, WEIGHTS), files)


def match_adapter(
    adapter: Adapter, family: HfFamily, cfg: AnyModelConfig, base: Mapping[str, Tensor]
) -> dict[str, TensorPair]:
    """Returns {PEFT module name: weight pair} of all modules with an adapter.

    base: tensors of the base model. PEFT stores a copy of an adapted head, which must equal the head in `base`.
    Raises BadInput for tensors that are not A or B of a weight, for ranks that differ from the config, and if the
    modules with tensors differ from the modules that the config targets.
    """
    names = set(adapter.tensors)
    attempts = [linear_modules(family, cfg, base) for base in family.prefixes]
    has_adapter = lambda module: f"{PEFT_PREFIX}{module}{A_SUFFIX}" in names
    modules = max(attempts, key=lambda found: sum(map(has_adapter, found)))
    found = {module: pair for module, pair in modules.items() if has_adapter(module)}
    known = {f"{PEFT_PREFIX}{module}{ending}" for module in found for ending in (A_SUFFIX, B_SUFFIX)}
    where, head_copy = adapter.folder / WEIGHTS, f"{PEFT_PREFIX}{HEAD}{BASE_SUFFIX}"
    if missing := sorted(known - names):
        raise BadInput(f"{where} has no {first_names(missing)}; download the file again")
    if HEAD in found and head_copy in names:
        known.add(head_copy)
        if not same_bytes(base[f"{HEAD}.weight"], adapter.tensors[head_copy]):
            raise BadInput(
                f"{where}: {head_copy} differs from {HEAD}.weight of the base model; set --base to the model "
                "that the adapter was trained with"
            )
    module_of = lambda name: name.removeprefix(PEFT_PREFIX).removesuffix(A_SUFFIX).removesuffix(B_SUFFIX)
    if others := {name for name in names - known if not matches_any(f"{module_of(name)}.weight", family.left_out)}:
        raise BadInput(
            f"{where} has {first_names(sorted(others))}, which are not LoRA matrices of model type "
            f"{family.model_type}; if PEFT can read the adapter, merge it with merge_and_unload"
        )
    for module in modules:
        if (module in found) != adapter.config.has(module):
            presence = "has tensors of" if module in found else "has no tensors of"
            raise BadInput(f"{where} {presence} {module}, which contradicts target_modules in {adapter_config.FILE}")
    if not found:
        raise BadInput(f"{where} has no LoRA matrices; download the file again")
    for module, pair in found.items():
        rank, outs, ins = adapter.config.rank_of(module), *out_in_dims(pair)
        for ending, shape in ((A_SUFFIX, (rank, ins)), (B_SUFFIX, (outs, rank))):
            if (hf_name := adapter.tensors[f"{PEFT_PREFIX}{module}{ending}"].shape) != shape:
                raise BadInput(
                    f"{where}: {module}{ending} has shape {list(hf_name)}, but {adapter_config.FILE} and the base "
                    f"model require {list(shape)}; set --base to the base model of this adapter"
                )
    return found


def linear_modules(family: HfFamily, cfg: AnyModelConfig, base: str) -> dict[str, TensorPair]:
    """Returns {module: weight pair} of all matrices except embeddings."""
    is_matrix = lambda pair: pair.row.inputs and pair.hf_name.endswith(".weight") and "embedding" not in pair.leaves[0]
    return {pair.hf_name.removesuffix(".weight"): pair for pair in filter(is_matrix, tensors(family, cfg, base))}


def out_in_dims(pair: TensorPair) -> tuple[int, int]:
    """Returns (out, in) of a matrix."""
    first, last = pair.hf_shape
    return (first, last) if pair.row.transposed else (last, first)


@dataclasses.dataclass(frozen=True)
class Merged(Tensor):
    """A weight with its adapter merged, in float32."""

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool

    def read(self) -> np.ndarray:
        """Returns W + scale * B @ A, computed in float64 in blocks of rows and rounded once."""
        merged, a, b = super().read().astype(np.float32), self.a.read(), self.b.read()
        w_OI = merged if self.transposed else merged.T
        a, b = a.astype(np.float64), b.astype(np.float64)
        rows = max(1, (8 << 20) // max(1, a.shape[1]))
        for row in range(0, len(w_OI), rows):
            w_OI[row : row + rows] += self.scale * (b[row : row + rows] @ a)
        return merged


def merged_tensors(
    adapter: Adapter, found: Mapping[str, TensorPair], matched: Sequence[TensorPair], base: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the base model's tensors. Tensors with an adapter are replaced by Merged."""
    module_of_leaf = {(pair.leaves, pair.place): module for module, pair in found.items()}
    merged = dict(base)
    for pair in matched:
        if module := module_of_leaf.get((pair.leaves, pair.place)):
            a, b = (adapter.tensors[f"{PEFT_PREFIX}{module}{ending}"] for ending in (A_SUFFIX, B_SUFFIX))
            fields: dict[str, Any] = {f.name: getattr(merged[pair.hf_name], f.name) for f in dataclasses.fields(Tensor)}
            scale = adapter.config.scale_of(module)
            merged[pair.hf_name] = Merged(**fields, a=a, b=b, scale=scale, transposed=pair.row.transposed)
    return merged


@dataclasses.dataclass(frozen=True)
class FusedAdapterPair(TensorPair):
    """A or B of one PEFT matrix that corresponds to several leaves."""

    def to_leaves(self, tensor: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns A for each leaf."""
        self.check(self.hf_name, tensor.shape, self.hf_shape)
        return tuple(tensor.T.reshape(shape) for shape in self.leaf_shapes)

    def to_hf(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """Returns A of all leaves, concatenated along the rank, or B of all leaves as a block-diagonal matrix."""
        if self.row.hf_name == A_SUFFIX:
            return np.concatenate([leaf.reshape(-1, leaf.shape[-1]).T for leaf in leaves])
        out = np.zeros(self.hf_shape, leaves[0].dtype)
        row = column = 0
        for leaf in (leaf.reshape(leaf.shape[0], -1).T for leaf in leaves):
            out[row : row + leaf.shape[0], column : column + leaf.shape[1]] = leaf
            row, column = row + leaf.shape[0], column + leaf.shape[1]
        return out


def adapter_pairs(module: str, pair: TensorPair, rank: int, out: bool = False) -> list[TensorPair]:
    """Returns the tensor pairs of A and B of a weight. out: True for an export, which stacks A of all fused leaves."""
    count, (outs, ins) = pair.row.inputs, out_in_dims(pair)
    several = len(pair.leaves) > 1
    hf_name = rank * len(pair.leaves) if several and out else rank
    kinds = ((A_SUFFIX, A, (hf_name, ins), several), (B_SUFFIX, B, (outs, hf_name), several and out))
    made = []
    for ending, which, hf_shape, is_fused in kinds:
        names = tuple(f"{name}{which}" for name in pair.leaves)
        shapes = [(*shape[:count], rank) if which == A else (rank, *shape[count:]) for shape in pair.leaf_shapes]
        inputs = count if which == A else 1
        row = dataclasses.replace(pair.row, leaf_names=names, hf_name=ending, inputs=inputs, transposed=True)
        pair_type = FusedAdapterPair if is_fused else TensorPair
        in_pairs = pair.interleaved_dims if which == B else 0  # interleaving permutes only outputs
        name = f"{PEFT_PREFIX}{module}{ending}"
        made.append(pair_type(names, pair.layer, tuple(shapes), name, hf_shape, row, interleaved_dims=in_pairs))
    return made


def run_from_adapter(
    adapter: Adapter, found: Mapping[str, TensorPair], cfg: AnyModelConfig
) -> tuple[LoraConfig, list[TensorPair]]:
    """Returns settings and tensors of a LoRA run that continues an adapter. Raises BadInput if that is impossible."""
    scales = {(adapter.config.rank_of(module), adapter.config.scale_of(module)) for module in found}
    where = f"--adapter: {adapter.folder}"
    fix = "but LoRA needs one rank, one scale and the same matrices in all layers; omit --adapter to merge it instead"
    if len(scales) > 1:
        raise BadInput(f"{where} has several ranks or scales, {fix}")
    ((rank, scale),) = scales
    if any(pair.expert is not None for pair in found.values()):
        raise BadInput(f"{where} adapts experts, which LoRA cannot train; omit --adapter to merge it instead")
    for name, number in collections.Counter(strip_layer(pair.leaves[0]) for pair in found.values()).items():
        if not name.startswith("blocks/"):
            raise BadInput(f"{where} adapts {name}, but LoRA adapts only blocks; omit --adapter to merge it instead")
        if number != cfg.num_layers:
            raise BadInput(f"{where} adapts {name} in {number} of {cfg.num_layers} layers, {fix}")
    pairs = [one for module, pair in found.items() for one in adapter_pairs(module, pair, rank)]
    names = sorted({name for pair in found.values() for name in map(strip_layer, pair.leaves)})
    targets = tuple(re.escape(name.removeprefix("blocks/").replace("/", ".")) + "$" for name in names)
    return LoraConfig(rank=rank, alpha=scale * rank, targets=targets), pairs


def strip_layer(name: str) -> str:
    """Returns a leaf name without its layer, such as 'blocks/attention/wq' for 'blocks/3/attention/wq'."""
    return re.sub(r"^blocks/\d+/", "blocks/", name)


def adapter_of_run(
    family: HfFamily, cfg: AnyModelConfig, lora: LoraConfig, has: Callable[[str], bool], base: str | None
) -> tuple[list[TensorPair], dict[str, Any]]:
    """Returns (tensor pairs, adapter_config.json) of a LoRA run. has: returns True if the checkpoint has a leaf."""
    pairs, joint, transposed = [], {}, True
    for module, pair in linear_modules(family, cfg, family.prefixes[0]).items():
        adapted = [name for name in pair.leaves if has(name + A)]
        if not adapted:
            continue
        if pair.expert is not None:
            raise BadInput(
                f"{adapted[0]} has an adapter, but adapters of experts cannot be exported, as PEFT's names for fused "
                "experts depend on its version; merge it with jaxscale ckpt merge_lora and export the result"
            )
        if len(adapted) < len(pair.leaves):
            raise BadInput(
                f"{adapted[0]} has an adapter, but other matrices of {module} do not, which PEFT cannot represent; "
                "merge them with jaxscale ckpt merge_lora and export the result"
            )
        pairs += adapter_pairs(module, pair, lora.rank, out=True)
        joint[".".join(module.split(".")[-2:])] = len(pair.leaves)
        transposed = pair.row.transposed
    if pairs and len(cfg.layer_stacks) > 1:
        raise BadInput(
            "layers without experts have no adapters, but PEFT's target_modules cannot exclude such layers; merge the "
            "adapters with jaxscale ckpt merge_lora and export the result"
        )
    return pairs, adapter_config.write(lora.rank, lora.alpha, list(joint), base, joint, transposed)


def base_model_folder(adapter: Adapter, given: str | None) -> str:
    """Returns the folder of an adapter's base model. Raises BadInput if it is unknown, ambiguous or not local."""
    base = given or adapter.config.base
    if base is None:
        raise BadInput(f"the adapter in {adapter.folder} does not name its base model; set --base=FOLDER")
    model = next((name for name in (hf_checkpoint.WEIGHTS, hf_checkpoint.INDEX) if name in adapter.files), None)
    ambiguous = given is None and model and hf_checkpoint.CONFIG in adapter.files
    if ambiguous and paths.absolute(base) != paths.absolute(adapter.folder):
        raise BadInput(
            f"the adapter in {adapter.folder} is for {base[:200]}, but its folder also has {model}: transformers 5 "
            f"applies it to {model}, but transformers 4 and PEFT to {base[:200]}; select one with --base=FOLDER"
        )
    if given is None and (paths.is_remote(base) or not paths.as_path(base).is_dir()):
        fetched = f"--base={base[:200]} to download it, or " if HUB_NAME.fullmatch(base) else ""
        raise BadInput(
            f"{adapter.folder} is an adapter of {base[:200]}, which is not a local folder; set {fetched}--base=FOLDER"
        )
    return base
