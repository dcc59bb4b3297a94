"""Folders as Hugging Face's tools write them, with random numbers, made without torch or transformers."""

import json
import pathlib

import ml_dtypes
import numpy as np

from jaxscale.tools.interop import families
from jaxscale.tools.interop.safetensors import NAMES, encode_header

LLAMA = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=96, hidden_size=16, intermediate_size=40,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GPT2 = dict(
    model_type="gpt2", architectures=["GPT2LMHeadModel"], vocab_size=96, n_embd=16, n_layer=2, n_head=2,
    n_positions=64, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
BFLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype("<f4")


def shapes_of(config):
    """{name: shape} of the tensors that a config.json calls for."""
    family, cfg, _ = families.read(config)
    return {pair.hf_name: pair.hf_shape for pair in families.tensors(family, cfg)}


def values_of(shapes, dtype, seed=0):
    """Random numbers for every tensor."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


def write_file(path, values):
    """A safetensors file with these tensors, in their order."""
    header = encode_header({name: (value.dtype, value.shape) for name, value in values.items()})
    path.write_bytes(header + b"".join(value.tobytes() for value in values.values()))


def make_folder(folder, config=LLAMA, dtype=BFLOAT16, files=1, seed=0):
    """The values by name; the folder holds them in so many files."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    values = values_of(shapes_of(config), dtype, seed)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        write_file(folder / "model.safetensors", values)
        return values
    names, places = list(values), {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        own = names[number::files]  # layers lie in several files, as they do in real ones
        write_file(folder / file, {name: values[name] for name in own})
        places |= dict.fromkeys(own, file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return values


def read_file(path):
    """{name: values} of a safetensors file, by the rules of the format and none of our code."""
    content = pathlib.Path(path).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    dtypes = {name: dtype for dtype, name in NAMES.items()}
    found = {}
    for name, told in header.items():
        begin, end = told["data_offsets"]
        values = np.frombuffer(content[8 + length + begin : 8 + length + end], dtypes[told["dtype"]])
        found[name] = values.reshape(told["shape"])
    return found


def read_folder(folder):
    """{name: values} of all files of a folder."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        found |= read_file(path)
    return found


def assert_same(left, right):
    """Fails unless both hold the same tensors, bit for bit."""
    assert sorted(left) == sorted(right)
    for name in left:
        assert left[name].dtype == right[name].dtype and left[name].shape == right[name].shape, name
        assert left[name].tobytes() == right[name].tobytes(), name


def make_large(folder, config, files, shapes=None):
    """A folder of bfloat16 files of any size, written a tensor at a time; the bytes of its largest tensor.

    shapes: of its tensors, where they are not those that the config calls for.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes, places = shapes or shapes_of(config), {}
    names, rng = list(shapes), np.random.default_rng(0)
    for number in range(files):
        own = names[number::files]
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        with open(folder / file, "wb") as out:
            out.write(encode_header({name: (BFLOAT16, shapes[name]) for name in own}))
            for name in own:
                size = int(np.prod(shapes[name]))
                words = rng.integers(0x3C00, 0x3F80, size, np.uint16)  # bfloat16 numbers from 0.008 to 1
                out.write(words.tobytes())
        places |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return max(int(np.prod(shape)) for shape in shapes.values()) * 2
