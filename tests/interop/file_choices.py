"""Folders with several files of one kind, and the files that transformers and PEFT read from each.

PYTHON4 tests/interop/file_choices.py > tests/interop/file_choices_4.json
PYTHON5 tests/interop/file_choices.py > tests/interop/file_choices_5.json
PYTHON5 tests/interop/file_choices.py FOLDER    # saves a random model in shards, another one over it, and loaded.npz

PYTHON4 has torch, transformers 4, peft and sentencepiece; PYTHON5 has transformers 5. Made with transformers 4.57.6 and
5.24.0, peft 0.21.2, sentencepiece 0.2.3, torch 2.13.0. Each weights file is filled with its own number, and each
tokenizer gives another number of tokens, so that a result names its file.
"""

import contextlib
import io
import json
import logging
import pathlib
import sys
import tempfile

import numpy as np

CONFIG = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=32, hidden_size=16, intermediate_size=24,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6,
    bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (32, 16),
    **{f"{LAYER}self_attn.{name}_proj.weight": (16, 16) for name in "qkvo"},
    **{f"{LAYER}mlp.{name}_proj.weight": (24, 16) for name in ("gate", "up")},
    f"{LAYER}mlp.down_proj.weight": (16, 24),
    **{f"{LAYER}{name}.weight": (16,) for name in ("input_layernorm", "post_attention_layernorm")},
    "model.norm.weight": (16,),
    "lm_head.weight": (32, 16),
}
NAMES, HEAD = list(SHAPES), "lm_head.weight"
QUERIES = f"base_model.model.{LAYER}self_attn.q_proj."
LORA = {f"{QUERIES}lora_A.weight": (2, 16), f"{QUERIES}lora_B.weight": (16, 2)}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
SHARDS = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
BINS = [f"pytorch_model-{number:05d}-of-00002.bin" for number in (1, 2)]
MORE, TEMPLATE, SETTINGS = "additional_chat_templates", "chat_template.jinja", "tokenizer_config.json"
FAST, MODEL, GENERATION = "tokenizer.json", "tokenizer.model", "generation_config.json"
TEXT = "mesh"


def filled(number, names=NAMES):
    """Returns tensors with this number in every place."""
    return {name: np.full((SHAPES | LORA)[name], number, np.float32) for name in names}


def index_of(files, halves=(NAMES[:6], NAMES[6:])):
    """Returns an index that puts each half of the tensors into one of the files."""
    places = {name: file for file, half in zip(files, halves) for name in half}
    return {"metadata": {"total_size": 0}, "weight_map": places}


def shards(files, first, second):
    """Returns the two files of a sharded model, filled with these numbers."""
    return {files[0]: filled(first, NAMES[:6]), files[1]: filled(second, NAMES[6:])}


def fast(size, **more):
    """Returns a tokenizer.json that splits TEXT into this many tokens: merges make beginnings of it."""
    ends = range(2, 6 - size)
    special, pieces = ["<unk>", "<s>", "</s>"], [*TEXT, *(TEXT[:end] for end in ends)]
    vocab = {piece: number for number, piece in enumerate([*special, *pieces])}
    model = dict(
        type="BPE", vocab=vocab, unk_token="<unk>", merges=[f"{TEXT[: end - 1]} {TEXT[end - 1]}" for end in ends]
    )
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    added = [dict(id=number, content=name, **flags) for number, name in enumerate(special)]
    parts = dict.fromkeys(["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"])
    return dict(version="1.0", added_tokens=added, model=model) | parts | more


def sentencepiece_model(*symbols):
    """Returns a SentencePiece model of letters and these symbols, with a space in front of texts."""
    import sentencepiece

    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 9), model_writer=file, model_type="bpe", vocab_size=8 + len(symbols),
        user_defined_symbols=list(symbols), hard_vocab_limit=False, minloglevel=2, num_threads=1,
    )  # fmt: skip
    return file.getvalue()


GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
LIKE_LLAMA = GENERIC | {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}
LETTERS = {name: number for number, name in enumerate(["<unk>", "<s>", "</s>", *TEXT])}


def weight_cases():
    """Returns {name: files} of folders with several weights files."""
    single, two = {WEIGHTS: filled(1)}, {INDEX: index_of(SHARDS)} | shards(SHARDS, 2, 3)
    bin_, bins = {"pytorch_model.bin": filled(4)}, shards(BINS, 5, 6)
    bins |= {"pytorch_model.bin.index.json": index_of(BINS)}
    fp16 = {"model.fp16.safetensors": filled(7)}
    fp16_shards = [name.replace("model", "model.fp16") for name in SHARDS]
    fp16_two = {"model.safetensors.index.fp16.json": index_of(fp16_shards)} | shards(fp16_shards, 8, 9)
    third = {"model-00003-of-00003.safetensors": filled(10)}
    moved = {INDEX: index_of(SHARDS, (NAMES[:5], NAMES[5:]))} | shards(SHARDS, 2, 3)
    unlisted = {INDEX: index_of(SHARDS, (NAMES[:6], NAMES[6:-1]))} | shards(SHARDS, 2, 3)
    twice = {INDEX: index_of(SHARDS), SHARDS[0]: filled(2, [*NAMES[:6], HEAD]), SHARDS[1]: filled(3, NAMES[6:])}
    return {
        "one file": single,
        "one file, index whose shards are gone": single | {INDEX: index_of(SHARDS)},
        "index and shards": two,
        "index, shards and one file": two | single,
        "shards without an index, and one file": shards(SHARDS, 2, 3) | single,
        "shards without an index": shards(SHARDS, 2, 3),
        "index whose shards are gone": {INDEX: index_of(SHARDS)},
        "index whose second shard is gone": {k: v for k, v in two.items() if k != SHARDS[1]},
        "index, shards, and a shard that is not in the index": two | third,
        "a tensor in another shard than the index says": moved,
        "a tensor in a shard and not in the index": unlisted,
        "a tensor in both shards with other numbers": twice,
        "pickled": bin_,
        "pickled, and one file": bin_ | single,
        "pickled, index and shards": bin_ | two,
        "pickled, and index whose shards are gone": bin_ | {INDEX: index_of(SHARDS)},
        "pickled shards": bins,
        "pickled shards, and one file": bins | single,
        "pickled shards, and shards": bins | two,
        "pickled shards, and one pickled": bins | bin_,
        "variant": fp16,
        "variant, and one file": fp16 | single,
        "variant, index and shards": fp16 | two,
        "variant, and pickled": fp16 | bin_,
        "variant in shards": fp16_two,
        "variant in shards, index and shards": fp16_two | two,
        "consolidated, and one file": {"consolidated.safetensors": filled(11)} | single,
        "consolidated": {"consolidated.safetensors": filled(11)},
        "one file in a subfolder": {f"original/{WEIGHTS}": filled(12)},
        "one file, and one in a subfolder": {f"original/{WEIGHTS}": filled(12)} | single,
        "config.json names another file": {"config.json": CONFIG | {"transformers_weights": "other.safetensors"},
                                           "other.safetensors": filled(13)} | single,
    }  # fmt: skip


def config_cases():
    """Returns {name: files} of folders with several settings of a model, or several names of one."""
    eos = lambda value: {GENERATION: {"eos_token_id": value}}
    of = lambda **more: {"config.json": CONFIG | more}
    return {
        "config.json": {},
        "generation_config.json with other ids": eos([3, 4]),
        "generation_config.json without an end": {GENERATION: {"bos_token_id": 5}},
        "generation_config.json that is empty": {GENERATION: {}},
        "generation_config.json of no ids": {GENERATION: {"do_sample": True}} | of(eos_token_id=[2, 6]),
        "torch_dtype": of(torch_dtype="bfloat16"),
        "dtype": of(dtype="bfloat16"),
        "dtype and torch_dtype": of(dtype="bfloat16", torch_dtype="float16"),
        "config.json for some versions": of(configuration_files=["config.4.0.0.json"])
        | {"config.4.0.0.json": CONFIG | {"eos_token_id": 7}},
        "config.json of another folder": {"original/config.json": CONFIG | {"eos_token_id": 7}},
    }


def tokenizer_cases():
    """Returns {name: files} of folders with several tokenizers."""
    model = sentencepiece_model()
    json_ = {FAST: fast(1), SETTINGS: GENERIC}
    llama = {SETTINGS: LIKE_LLAMA}
    words = dict(type="WordPiece", vocab={"[UNK]": 0, TEXT: 1}, unk_token="[UNK]", max_input_chars_per_word=100,
                 continuing_subword_prefix="##")  # fmt: skip
    bert = {SETTINGS: {"tokenizer_class": "BertTokenizer", "unk_token": "[UNK]", "sep_token": "[SEP]"}}
    bert_json = {FAST: fast(1) | {"model": words, "added_tokens": [], "pre_tokenizer": {"type": "BertPreTokenizer"}}}
    vocab_txt = {"vocab.txt": "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "m", "##e", "##s", "##h"])}
    gpt2 = {SETTINGS: {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "unk_token": "<unk>"}}
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    old = {"vocab.json": LETTERS, "merges.txt": "#version: 0.2\n"}
    return {
        "tokenizer.json": json_,
        "tokenizer.json without settings": {FAST: fast(1)},
        "tokenizer.json and tokenizer.model": json_ | {MODEL: model},
        "tokenizer.json and tokenizer.model of a Llama": {FAST: fast(1), MODEL: model} | llama,
        "tokenizer.model of a Llama": {MODEL: model} | llama,
        "tokenizer.model without settings": {MODEL: model},
        "tokenizer.model and spiece.model": {MODEL: model, "spiece.model": sentencepiece_model("me")} | llama,
        "tokenizer.json and spiece.model": json_ | {"spiece.model": sentencepiece_model("me")},
        "tokenizer.json and vocab.txt": bert_json | vocab_txt | bert,
        "tokenizer.json and vocab.json": {FAST: fast(1, pre_tokenizer=byte_level, decoder=byte_level)} | old | gpt2,
        "vocab.json": old | gpt2,
        "tokenizer.json and one for some versions": {
            FAST: fast(4), "tokenizer.4.0.0.json": fast(2),
            SETTINGS: GENERIC | {"fast_tokenizer_files": [FAST, "tokenizer.4.0.0.json"]},
        },
        "tokenizer.json and one in a subfolder": {FAST: fast(4), f"other/{FAST}": fast(2), SETTINGS: GENERIC},
    }  # fmt: skip


def end_cases():
    """Returns {name: files} of folders in which several files name the token that ends a text."""
    map_, decoder = {"special_tokens_map.json": {"eos_token": "<s>"}}, {"added_tokens_decoder": {}}
    cases = {
        "eos_token": {SETTINGS: GENERIC},
        "eos_token and special_tokens_map.json": {SETTINGS: GENERIC} | map_,
        "eos_token, added_tokens_decoder and special_tokens_map.json": {SETTINGS: GENERIC | decoder} | map_,
        "special_tokens_map.json alone": map_,
    }
    return {name: {FAST: fast(4)} | files for name, files in cases.items()}


def template_cases():
    """Returns {name: files} of folders with several chat templates; each template is the name of its place."""
    text = {SETTINGS: GENERIC | {"chat_template": "settings"}}
    named = [dict(name="default", template="settings"), dict(name="tool_use", template="settings tools")]
    listed = {SETTINGS: GENERIC | {"chat_template": named}}
    tools = {SETTINGS: GENERIC | {"chat_template": named[1:]}}
    jinja = {TEMPLATE: "jinja"}
    more = {f"{MORE}/tool_use.jinja": "more tools"}
    default, processor = {f"{MORE}/default.jinja": "more"}, {"chat_template.json": {"chat_template": "processor"}}
    cases = {
        "no template": {SETTINGS: GENERIC},
        "settings": text,
        "several in settings": listed,
        "several in settings, none of them default": tools,
        "jinja": {SETTINGS: GENERIC} | jinja,
        "jinja and settings": text | jinja,
        "jinja and several in settings": listed | jinja,
        "jinja and more": {SETTINGS: GENERIC} | jinja | more,
        "jinja, more and settings": text | jinja | more,
        "more": {SETTINGS: GENERIC} | more,
        "more and settings": text | more,
        "more and several in settings": listed | more,
        "more with default": {SETTINGS: GENERIC} | more | default,
        "more with default, and settings": text | more | default,
        "more with default, and jinja": {SETTINGS: GENERIC} | default | jinja,
        "more with only default, and settings": text | default,
        "processor": {SETTINGS: GENERIC} | processor,
        "processor and settings": text | processor,
        "processor and jinja": {SETTINGS: GENERIC} | processor | jinja,
        "processor and more": {SETTINGS: GENERIC} | processor | more,
    }
    return {name: {FAST: fast(4)} | files for name, files in cases.items()}


def adapter_cases():
    """Returns {name: files} of folders base/ and adapter/, filled with 1 and 2, and further models."""
    within = lambda folder, files: {f"{folder}/{name}": content for name, content in files.items()}
    model = lambda number: {"config.json": CONFIG, WEIGHTS: filled(number)}
    of = lambda base: {ADAPTER_CONFIG: dict(
        peft_type="LORA", r=2, lora_alpha=2, target_modules=["q_proj"], task_type="CAUSAL_LM", bias="none",
        base_model_name_or_path=base,
    )}  # fmt: skip
    lora, bin_ = {ADAPTER: filled(2, LORA)}, {"adapter_model.bin": filled(3, LORA)}
    base, of_base = within("base", model(1)), of("{root}/base")
    two = {"config.json": CONFIG, INDEX: index_of(SHARDS)} | shards(SHARDS, 5, 6)
    cases = {
        "adapter": of_base | lora,
        "adapter, and pickled": of_base | lora | bin_,
        "pickled adapter": of_base | bin_,
        "adapter with a model's file": of_base | lora | {WEIGHTS: filled(4)},
        "adapter with a config.json": of_base | lora | {"config.json": CONFIG},
        "adapter with a whole model": of_base | lora | model(4),
        "adapter with a whole model in shards": of_base | lora | two,
        "adapter with the model that it names": of("{root}/adapter") | lora | model(4),
        "settings of an adapter with a whole model": of_base | model(4),
        "adapter without its settings, with a whole model": lora | model(4),
    }
    cases = {name: base | within("adapter", files) for name, files in cases.items()}
    nested = within("adapter", of("{root}/first") | lora) | within("first", of_base | {ADAPTER: filled(7, LORA)}) | base
    return cases | {
        "adapter of an adapter": nested,
        "adapter of a whole model with an adapter": nested | within("first", model(8)),
    }


KINDS = {
    "weights": weight_cases, "config": config_cases, "tokenizer": tokenizer_cases, "end": end_cases,
    "template": template_cases, "adapter": adapter_cases,
}  # fmt: skip


def cases():
    """Returns {(kind, name): files}."""
    return {(kind, name): files for kind, make in KINDS.items() for name, files in make().items()}


def write(folder, kind, files):
    """Writes the files; with a config.json and, where another kind of file is asked for, with one weights file."""
    if kind != "adapter":
        files = {"config.json": CONFIG} | ({} if kind == "weights" else {WEIGHTS: filled(1)}) | files
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith((".bin", ".safetensors")):
            content = pickled(content) if name.endswith(".bin") else encoded(content)
        elif not isinstance(content, bytes):
            text = content if isinstance(content, str) else json.dumps(content)
            content = text.replace("{root}", str(folder)).encode()
        path.write_bytes(content)


def encoded(tensors):
    """Returns the content of a safetensors file."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, value in tensors.items():
        offsets = [end, end + value.nbytes]
        header[name], end = dict(dtype="F32", shape=list(value.shape), data_offsets=offsets), offsets[1]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(value.tobytes() for value in tensors.values())


def pickled(tensors):
    """Returns the content of a file of torch's; b'' without torch, for what never reads one."""
    if "torch" not in sys.modules:
        return b""
    import torch

    torch.save({name: torch.from_numpy(value) for name, value in tensors.items()}, file := io.BytesIO())
    return file.getvalue()


def numbers(tensors):
    """Returns the number in each tensor, in the order of NAMES, equal neighbors once; None for a tensor of several."""
    flat = [np.asarray(tensors[name], np.float32).ravel() for name in NAMES]
    found = [float(one[0]) if (one == one[0]).all() else None for one in flat]
    return [one for one, before in zip(found, ["", *found]) if one != before]


def plain(tensors):
    """Returns [the numbers of the model's own tensors, and the number of each A of an adapter]."""
    state = {name.removeprefix("base_model.model."): np.asarray(value) for name, value in tensors.items()}
    lora = [float(value.flat[0]) for name, value in state.items() if ".lora_A." in name]
    return [numbers({name.replace(".base_layer", ""): value for name, value in state.items()}), *lora]


def read(kind, folder):
    """Returns what transformers reads from a folder, or the name of its error."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load = lambda place: AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    try:
        if kind == "weights":
            return numbers(load(folder).state_dict())
        if kind == "config":
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
            ends = [getattr(model.generation_config, f"{name}_token_id") for name in ("bos", "eos")]
            return [*ends, str(model.dtype)]
        if kind == "adapter":
            return read_adapter(load, folder / "adapter")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if kind == "tokenizer":
            return len(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
        return tokenizer.eos_token if kind == "end" else tokenizer.get_chat_template()
    except Exception as error:  # anything that keeps it from being read
        return type(error).__name__


def read_adapter(load, folder):
    """Returns [what transformers reads, what PEFT reads], each as `plain` or the name of an error."""
    import peft

    found = []
    for one in (load, peft.AutoPeftModelForCausalLM.from_pretrained):
        try:
            found.append(plain(one(folder).state_dict()))
        except Exception as error:
            found.append(type(error).__name__)
    return found


def save_over(folder):
    """Saves a model in shards and another one in a single file over it; loaded.npz has what transformers then loads."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    for seed, more in ((0, dict(max_shard_size="4KB")), (1, {})):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**CONFIG)).float().save_pretrained(folder, **more)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    np.savez(folder / "loaded.npz", **{name: value.numpy() for name, value in loaded.items()})


def read_all():
    """Prints {"kind: name": what transformers reads}."""
    import torch  # noqa: F401  pickled() asks for it
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable()
    found = {}
    with tempfile.TemporaryDirectory() as root, contextlib.redirect_stdout(sys.stderr):
        for number, ((kind, name), files) in enumerate(cases().items()):
            folder = pathlib.Path(root, str(number))
            write(folder, kind, files)
            found[f"{kind}: {name}"] = read(kind, folder)
    print("{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items()) + "\n}")


if __name__ == "__main__":
    save_over(pathlib.Path(sys.argv[1])) if sys.argv[1:] else read_all()
