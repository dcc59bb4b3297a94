"""Opens the folder of a Hugging Face model: config.json and the safetensors files of its index.

The sizes in config.json are compared with the tensors before anything is allocated by them.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from jaxscale.checkpoint.storage_errors import stop_if_unreachable
from jaxscale.interop.config import HUB_NAME
from jaxscale.interop.ranges import look_at, names_in
from jaxscale.interop.safetensors import Tensor, read_header, same_bytes
from jaxscale.system import foreign, paths
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
VARIANT = re.compile(r"model\.[\w-]+\.safetensors|model\.safetensors\.index\.[\w-]+\.json")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")  # torch's: reading one can run what it holds
LAYERS = ("num_hidden_layers", "n_layer")  # each has tensors of its own
MOST_LAYERS = 4096  # the deepest published models have about 130
SIZES = (  # each is an axis of some tensor, or divides one
    "vocab_size", "hidden_size", "n_embd", "intermediate_size", "n_inner", "num_attention_heads", "n_head",
    "num_key_value_heads", "head_dim", "n_positions", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts")
ROUTER = ".gate.weight"  # how the name of a router ends
MOST_EXPERTS = 4096  # of a layer: published models have up to 512
TOKENS = ("max_position_embeddings", "sliding_window")
LONGEST = 1 << 31  # tokens: no model reads so many
END_IDS = ("bos_token_id", "eos_token_id")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model of Hugging Face's, not yet read."""

    folder: Any
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, int]  # all that lies in the folder: name and bytes
    notes: tuple[str, ...] = ()  # what a person should know of the choice among its files

    @property
    def identity(self) -> str:
        """sha256 of where its tensors lie, and of the version of each file: what makes it another one."""
        located = [
            [t.name, t.file.name, t.file.size, t.file.version, t.kind, t.shape, t.start] for t in self.tensors.values()
        ]
        return hashlib.sha256(json.dumps([self.config, sorted(located)], sort_keys=True).encode()).hexdigest()


def open_checkpoint(name: str, named: str = "--from") -> Checkpoint:
    """The model in a folder, local or gs://, with every header read and checked. named: the flag that gave it.

    Raises: BadInput, one line, if there is none, if it is pickled, or if a file breaks the rules of its format.
    """
    if name.endswith(PICKLED) or name.endswith(".safetensors"):
        pickled = name.endswith(PICKLED)
        raise BadInput(f"{named}={name} " + (unpickled(name) if pickled else "is a file: give the folder it lies in"))
    folder = paths.as_path(name)
    files = stop_if_unreachable(lambda: names_in(folder), folder)
    if not files:
        hint = f"; to fetch it: hf download {name} --local-dir FOLDER" if HUB_NAME.fullmatch(name) else ""
        raise BadInput(f"{named}={name} is no folder with files in it{hint}")
    if CONFIG not in files:
        raise BadInput(f"{named}={name} holds no {CONFIG}: it is not the folder of a Hugging Face model")
    config = read_object(folder, CONFIG, files)
    both = f"{WEIGHTS} is read, as transformers does, and {INDEX} next to it is not"
    notes = (both,) if WEIGHTS in files and INDEX in files else ()
    return Checkpoint(folder, config, find_tensors(f"{named}={name}", folder, files), files, notes)


def find_tensors(flag: str, folder: Any, files: dict[str, int]) -> dict[str, Tensor]:
    """Returns {name: tensor} of the folder's one file of weights, else of the files in its index, as transformers does.

    flag: the flag with the folder. Raises BadInput where there is neither, and as read_index does.
    """
    if WEIGHTS in files:
        return headers(folder, [WEIGHTS])[WEIGHTS]
    if INDEX in files:
        return read_index(folder, files)
    if pickled := [file for file in files if file.endswith(PICKLED) and file != "training_args.bin"]:
        raise BadInput(f"{flag} has {pickled[0]}, which {unpickled(str(folder))}")
    missing = f"{flag} has neither {WEIGHTS} nor {INDEX}"
    if variants := sorted((file for file in files if VARIANT.fullmatch(file)), key=lambda file: ".index." not in file):
        raise BadInput(
            f"{missing}; there is {variants[0]}, a variant, which transformers too reads only where it is named: "
            f"rename it to {INDEX if '.index.' in variants[0] else WEIGHTS}"
        )
    others = [file for file in files if file.endswith((".safetensors", ".gguf", ".h5", ".msgpack"))]
    raise BadInput(missing + (f"; there is {others[0]}" if others else ""))


def read_index(folder: Any, files: dict[str, int]) -> dict[str, Tensor]:
    """Returns {name: tensor} of every file in the index: transformers loads all that is in them.

    Raises: BadInput for an index that does not belong to the files, and for a tensor that two of them have otherwise.
    """
    places = read_object(folder, INDEX, files).get("weight_map")
    where = f"{folder / INDEX}: weight_map"
    if not isinstance(places, dict) or not places:
        raise BadInput(f"{where} is no table of names and files; fetch it again")
    for tensor, file in places.items():
        if not isinstance(file, str) or not is_plain(file):
            raise BadInput(f"{where} puts {tensor!r} into {str(file)[:120]!r}, which is no .safetensors file beside it")
        if file not in files:
            raise BadInput(f"{where} puts {tensor!r} into {file}, which is not there; fetch it")
    found = headers(folder, sorted(set(places.values())))
    for tensor, file in places.items():
        if tensor not in found[file]:
            raise BadInput(f"{where} puts {tensor!r} into {file}, which does not have it; fetch both again")
    tensors: dict[str, Tensor] = {}
    for file, inside in found.items():
        for name, tensor in inside.items():
            if name in tensors and not same_bytes(tensors[name], tensor):
                raise BadInput(
                    f"{folder}: {name} in {tensors[name].file.name} and in {file} differ; remove the file that is old"
                )
            tensors[name] = tensor
    return tensors | {tensor: found[file][tensor] for tensor, file in places.items()}


def headers(folder: Any, files: list[str]) -> dict[str, dict[str, Tensor]]:
    """{file: {name: tensor}}."""
    return {file: read_header(stop_if_unreachable(lambda file=file: look_at(folder / file), folder)) for file in files}


def is_plain(file: str) -> bool:
    """True for the name of a .safetensors file in the same folder, and for no path that leads elsewhere."""
    return re.fullmatch(r"[\w][\w.=+-]*\.safetensors", file, re.ASCII) is not None


def read_object(folder: Any, name: str, files: dict[str, int]) -> dict[str, Any]:
    """The JSON object in a file. Raises BadInput if it is none, or too large to be one of ours."""
    if files[name] > foreign.LARGEST_JSON:
        raise BadInput(f"{folder / name} has {files[name]} bytes, more than the {foreign.LARGEST_JSON} that are read")
    content = stop_if_unreachable(lambda: foreign.read_bytes(folder / name), folder)
    try:
        value = foreign.parse_json(content)
    except BadInput as error:
        raise BadInput(f"{folder / name} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise BadInput(f"{folder / name} is no JSON object; fetch it again")
    return value


def unpickled(name: str) -> str:
    """Why a pickled file is not read, and the command that makes safetensors of it."""
    folder = name.rpartition("/")[0] if name.endswith(PICKLED) else name
    made = "; ".join(f"{which}.from_pretrained('{folder or '.'}').save_pretrained('FOLDER')" for which in "mt")
    return (
        "is pickled: reading it can run code that it holds, so it is never read here. If you trust it: "
        'python -c "from transformers import AutoModelForCausalLM as m, AutoTokenizer as t; '
        f'{made}", then --from=FOLDER'
    )


def check_counts(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises BadInput for a number that no model with these tensors can have."""
    whole = [tensor.shape for tensor in tensors.values() if tensor.stop > tensor.start]  # others may have any shape
    longest = max((size for shape in whole for size in shape), default=0)
    routers = [tensor.shape for name, tensor in tensors.items() if name.endswith(ROUTER)]
    of_routers = max((shape[0] for shape in routers if shape), default=longest)
    rules = [
        (LAYERS, min(len(tensors), MOST_LAYERS), f"there are {len(tensors):,} tensors"),
        (SIZES, longest, f"the longest axis of a tensor has {longest:,}"),
        (EXPERTS, min(of_routers, MOST_EXPERTS), f"the longest first axis of a router has {of_routers:,}"),
        (TOKENS, LONGEST, "no model reads so many"),
    ]
    inner = config.get("text_config")
    for group in (config, inner if isinstance(inner, Mapping) else {}):
        for names, most, why in rules:
            for name in names:
                check_count(name, group.get(name), most, why)


def check_count(name: str, value: Any, most: int, why: str) -> None:
    """Raises BadInput unless it is a whole number from 1 to `most`, or not told."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(f"config.json: {name}={short(value)} must be a whole number, 1 or more")
    if value > most:
        raise BadInput(f"config.json: {name}={short(value)} is too much: {why}; fetch it again")


def check_end_ids(config: Mapping[str, Any], vocab_size: int, where: str) -> None:
    """Raises BadInput for a bos_token_id or eos_token_id that is no id, or no list of ids, of such a vocabulary."""
    for name in END_IDS:
        value = config.get(name)
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            if type(one) is not int or not 0 <= one < vocab_size:
                raise BadInput(
                    f"{where}: {name}={short(value)} must be an id from 0 to {vocab_size - 1}, or a list of them"
                )
