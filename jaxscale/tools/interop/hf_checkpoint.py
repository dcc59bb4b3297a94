"""Opens the folder of a Hugging Face model: config.json, whose sizes are validated, and safetensors files."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from jaxscale.runtime.checkpoint.config import HUB_NAME
from jaxscale.runtime.checkpoint.storage_errors import stop_if_unreachable
from jaxscale.system import foreign, paths
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.tools.interop.safetensors import Tensor, list_files, read_header, same_bytes, stat_file

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
VARIANT = re.compile(r"model\.[\w-]+\.safetensors|model\.safetensors\.index\.[\w-]+\.json")
PLAIN_NAME = re.compile(r"[\w][\w.=+-]*\.safetensors", re.ASCII)  # a file name without a path
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")  # loading a pickle can run code
LAYERS = ("num_hidden_layers", "n_layer")
MAX_LAYERS = 4096  # the deepest published models have about 130
SIZES = (  # each is the size of a tensor axis, or a divisor of such a size
    "vocab_size", "hidden_size", "n_embd", "intermediate_size", "n_inner", "num_attention_heads", "n_head",
    "num_key_value_heads", "head_dim", "n_positions", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts")
ROUTER = ".gate.weight"  # suffix of a router's name
MAX_EXPERTS = 4096  # per layer; published models have up to 512
TOKEN_COUNTS = ("max_position_embeddings", "sliding_window")
MAX_TOKENS = 1 << 31  # tokens, above any model's context
END_IDS = ("bos_token_id", "eos_token_id")


@dataclasses.dataclass(frozen=True)
class HfCheckpoint:
    """A Hugging Face checkpoint with parsed headers."""

    folder: Any
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, int]  # {file name: size in bytes}
    notes: tuple[str, ...] = ()  # lines to print about the selected files

    @property
    def identity(self) -> str:
        """SHA-256 of the config, and of the file, file version, dtype, shape and offset of each tensor."""
        locate = lambda t: [t.name, t.file.name, t.file.size, t.file.version, t.dtype_name, t.shape, t.start]
        located = sorted(map(locate, self.tensors.values()))
        return hashlib.sha256(json.dumps([self.config, located], sort_keys=True).encode()).hexdigest()


def open_checkpoint(name: str, flag: str = "--from") -> HfCheckpoint:
    """Opens a local or gs:// folder. Raises BadInput for an invalid file. flag: command-line flag in error messages."""
    if name.endswith(PICKLED) or name.endswith(".safetensors"):
        pickled = name.endswith(PICKLED)
        raise BadInput(f"{flag}={name} " + (pickle_message(name) if pickled else "is a file; give its folder"))
    folder = paths.as_path(name)
    files = stop_if_unreachable(lambda: list_files(folder), folder)
    if not files:
        hint = f"; to download it: hf download {name} --local-dir FOLDER" if HUB_NAME.fullmatch(name) else ""
        raise BadInput(f"{flag}={name} is not a folder, or is empty{hint}")
    if CONFIG not in files:
        raise BadInput(f"{flag}={name} has no {CONFIG}; give the folder of a Hugging Face model")
    config = read_object(folder, CONFIG, files)
    both = f"{WEIGHTS} is read and {INDEX} is ignored, as in transformers"
    notes = (both,) if WEIGHTS in files and INDEX in files else ()
    return HfCheckpoint(folder, config, find_tensors(f"{flag}={name}", folder, files), files, notes)


def find_tensors(flag: str, folder: Any, files: dict[str, int]) -> dict[str, Tensor]:
    """Returns the tensors in model.safetensors or in the files of the index. Raises BadInput if neither exists."""
    if WEIGHTS in files:
        return tensors_of(folder, WEIGHTS)
    if INDEX in files:
        return read_index(folder, files)
    if pickled := [file for file in files if file.endswith(PICKLED) and file != "training_args.bin"]:
        raise BadInput(f"{flag} has {pickled[0]}, which {pickle_message(str(folder))}")
    missing = f"{flag} has neither {WEIGHTS} nor {INDEX}"
    if variants := sorted((file for file in files if VARIANT.fullmatch(file)), key=lambda file: ".index." not in file):
        raise BadInput(
            f"{missing}, only the variant {variants[0]}, which transformers does not load by default; "
            f"rename it to {INDEX if '.index.' in variants[0] else WEIGHTS}"
        )
    others = [file for file in files if file.endswith((".safetensors", ".gguf", ".h5", ".msgpack"))]
    raise BadInput(missing + (f"; there is {others[0]}" if others else ""))


def read_index(folder: Any, files: dict[str, int]) -> dict[str, Tensor]:
    """Returns {name: tensor} of all files in the index. Raises BadInput if the index does not match the files."""
    weight_map = read_object(folder, INDEX, files).get("weight_map")
    where = f"{folder / INDEX}: weight_map"
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{where} must map tensor names to files; download it again")
    found: dict[str, dict[str, Tensor]] = {}
    for tensor, file in weight_map.items():
        put = f"{where} maps {tensor!r} to"
        if not isinstance(file, str) or not PLAIN_NAME.fullmatch(file):
            raise BadInput(f"{put} {str(file)[:120]!r}, which is not a .safetensors file in the same folder")
        if file not in files:
            raise BadInput(f"{put} {file}, which is missing; download it")
        if file not in found:
            found[file] = tensors_of(folder, file)
        if tensor not in found[file]:
            raise BadInput(f"{put} {file}, which does not contain this tensor; download both files again")
    tensors: dict[str, Tensor] = {}
    for file, inside in sorted(found.items()):
        for name, tensor in inside.items():
            if name in tensors and not same_bytes(tensors[name], tensor):
                raise BadInput(
                    f"{folder}: {name} differs between {tensors[name].file.name} and {file}; remove the outdated file"
                )
            tensors[name] = tensor
    return tensors | {tensor: found[file][tensor] for tensor, file in weight_map.items()}


def tensors_of(folder: Any, file: str) -> dict[str, Tensor]:
    """Returns {name: tensor} of a safetensors file. Raises BadInput for an invalid file."""
    return read_header(stop_if_unreachable(lambda: stat_file(folder / file), folder))


def read_object(folder: Any, name: str, files: dict[str, int]) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises BadInput if the file is too large or has other contents."""
    if files[name] > foreign.LARGEST_JSON:
        raise BadInput(f"{folder / name} is {files[name]} bytes, which exceeds the limit of {foreign.LARGEST_JSON}")
    content = stop_if_unreachable(lambda: foreign.read_bytes(folder / name), folder)
    try:
        value = foreign.parse_json(content)
    except BadInput as error:
        raise BadInput(f"{folder / name} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise BadInput(f"{folder / name} is not a JSON object; download it again")
    return value


def pickle_message(name: str) -> str:
    """Returns the reason why pickles are not read, with a command that converts a pickle to safetensors."""
    folder = name.rpartition("/")[0] if name.endswith(PICKLED) else name
    made = "; ".join(f"{which}.from_pretrained('{folder or '.'}').save_pretrained('FOLDER')" for which in "mt")
    return (
        "is pickled and is never read, because unpickling can run code. If you trust it: "
        'python -c "from transformers import AutoModelForCausalLM as m, AutoTokenizer as t; '
        f'{made}", then --from=FOLDER'
    )


def check_counts(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises BadInput for a size in config.json that these tensors cannot have, such as too many layers."""
    whole = [tensor for tensor in tensors.values() if tensor.stop > tensor.start]  # empty tensors may have any shape
    longest = max((size for tensor in whole for size in tensor.shape), default=0)
    routers = [tensor.shape for name, tensor in tensors.items() if name.endswith(ROUTER)]
    max_experts = max((shape[0] for shape in routers if shape), default=longest)
    rules = [
        (LAYERS, min(len(tensors), MAX_LAYERS), f"there are {len(tensors):,} tensors"),
        (SIZES, longest, f"the longest tensor axis is {longest:,}"),
        (EXPERTS, min(max_experts, MAX_EXPERTS), f"the largest router has {max_experts:,} experts"),
        (TOKEN_COUNTS, MAX_TOKENS, "no model has a longer context"),
    ]
    inner = config.get("text_config")
    for group in (config, inner if isinstance(inner, Mapping) else {}):
        for name, most, reason in ((name, *rule) for names, *rule in rules for name in names):
            if (value := group.get(name)) is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadInput(f"config.json: {name}={short(value)} must be a positive integer")
            if value > most:
                raise BadInput(f"config.json: {name}={short(value)} is too large: {reason}; download it again")


def check_end_ids(config: Mapping[str, Any], vocab_size: int, where: str) -> None:
    """Raises BadInput if bos_token_id or eos_token_id is not an id in the vocabulary, or a list of such ids."""
    for name in END_IDS:
        value = config.get(name)
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            if type(one) is not int or not 0 <= one < vocab_size:
                raise BadInput(
                    f"{where}: {name}={short(value)} must be an id from 0 to {vocab_size - 1}, or a list of such ids"
                )
