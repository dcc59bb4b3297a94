"""Tokenizer folders in every layout that transformers writes, with the ids that transformers gives for them.

PYTHON4 tests/text/make_added_token_references.py write FOLDER     the folders, by transformers 4 with sentencepiece
PYTHON5 tests/text/make_added_token_references.py write5 FOLDER    more of them, by transformers 5
PYTHON4 tests/text/make_added_token_references.py read FOLDER OUT4 what transformers 4 makes of each
PYTHON5 tests/text/make_added_token_references.py read FOLDER OUT5 what transformers 5 does
PYTHON4 tests/text/make_added_token_references.py pack FOLDER OUT4 OUT5 tests/text/added_tokens.json.gz

Made with transformers 4.57.6 (tokenizers 0.22.2) and 5.24.0; sentencepiece 0.2.3.
"""

import base64
import gzip
import io
import json
import pathlib
import shutil
import sys

import transformers

LINES = [
    "The mesh says where an axis lives, and the model what it means.",
    "  two spaces,\na line\tand a tab: naïve café 日本語 🙂 ",
    "12345 + 678 = 13023 isn't 42",
]
TEXTS = [
    "The mesh", " The mesh", "a line\nand  a tab", "naïve 日本語 🙂", "what <think>it means</think> here",
    "x<think> y", "", "where an axis<tool>lives", " <think>", "isn't\n<think>\n42 ",
]  # fmt: skip
TALK = [
    {"role": "user", "content": "The mesh says"},
    {"role": "assistant", "content": "where an axis lives"},
    {"role": "user", "content": " what <think>it means\n"},
]
CHATML = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INST = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] }}"
    "{{ ' [/INST]' }}{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MAP, ADDED, CONFIG = "special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"


def byte_level(folder):
    """A byte-level tokenizer.json with one special token, and nothing beside it."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = dict(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(LINES * 9, trainers.BpeTrainer(**how))
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return made


def sentencepiece_model(folder, **how):
    """A SentencePiece BPE model in the manner of Llama's."""
    import sentencepiece

    file = io.BytesIO()
    usual = dict(unk_id=0, bos_id=1, eos_id=2, pad_id=-1, add_dummy_prefix=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 9), model_writer=file, model_type="bpe", vocab_size=340, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
        split_digits=True, hard_vocab_limit=False, minloglevel=2, num_threads=1, **(usual | how),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(file.getvalue())


def edit(folder, name, change):
    """Writes a JSON file again as `change` makes it."""
    path = folder / name
    path.write_text(json.dumps(change(json.loads(path.read_text()) if path.exists() else {}), indent=1))


def config(folder, kind):
    """What says of which model it is."""
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))


def added(tokenizer):
    """The tokenizer with the tokens of ChatML, the end of a turn as its end, and one that is not special."""
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(["<think>", transformers.AddedToken("<tool>", lstrip=True, rstrip=True)])
    tokenizer.chat_template = CHATML
    return tokenizer


def write(root):
    """Layouts that transformers 4 writes, and that older releases and other tools have written."""
    from transformers import LlamaTokenizer, LlamaTokenizerFast, PreTrainedTokenizerFast

    def layout(name, start=None, kind="llama"):
        folder = root / name
        if start:
            shutil.copytree(root / start, folder)
        folder.mkdir(parents=True, exist_ok=True)
        config(folder, kind)
        return folder

    byte_level(root / "plain")
    config(root / "plain", "llama")
    plain = (root / "plain/tokenizer.json").read_bytes()
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(root / "plain/tokenizer.json"), eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    added(fast).save_pretrained(layout("fast"))
    folder = layout("fast, its tokenizer.json before", "fast")
    (folder / "tokenizer.json").write_bytes(plain)
    folder = layout("fast, template in the config", "fast, its tokenizer.json before")
    (folder / "chat_template.jinja").unlink()
    edit(folder, CONFIG, lambda was: was | {"chat_template": CHATML})
    without = lambda was: {k: v for k, v in was.items() if k != "added_tokens_decoder"}
    folder = layout("fast, added_tokens.json and the map", "fast, its tokenizer.json before")
    edit(folder, CONFIG, without)
    edit(folder, ADDED, lambda was: {"<|im_end|>": 300, "<|im_start|>": 301, "<think>": 302, "<tool>": 303})
    folder = layout("fast, the map alone", "fast, its tokenizer.json before")
    edit(folder, CONFIG, lambda was: {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    (folder / ADDED).unlink(missing_ok=True)
    folder = layout("fast, the end in the config alone", "fast, its tokenizer.json before")
    (folder / MAP).unlink()
    (folder / ADDED).unlink(missing_ok=True)
    edit(folder, CONFIG, lambda was: {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
                                      "additional_special_tokens": ["<|im_start|>"]})  # fmt: skip
    folder = layout("fast, the config and the map differ", "fast, its tokenizer.json before")
    edit(folder, MAP, lambda was: {"eos_token": "<|endoftext|>"})
    folder = layout("fast, a prefix space in the config", "fast")
    edit(folder, CONFIG, lambda was: was | {"add_prefix_space": True})
    folder = layout("fast, special in the config alone", "fast")

    def special_think(was):
        for token in was["added_tokens_decoder"].values():
            token["special"] |= token["content"] == "<think>"
        return was

    edit(folder, CONFIG, special_think)

    sentencepiece_model(root / "model")
    edit(root / "model", CONFIG, lambda was: {"tokenizer_class": "LlamaTokenizer"})
    config(root / "model", "llama")
    folder = layout("slow, a piece renamed", "model")
    rename = {"content": "<|im_end|>", "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    edit(folder, CONFIG, lambda was: was | {"added_tokens_decoder": {"2": rename}, "eos_token": "<|im_end|>"})
    for name, legacy in (("slow", True), ("slow, not legacy", False)):
        slow = LlamaTokenizer(str(root / "model/tokenizer.model"), legacy=legacy)
        added(slow).save_pretrained(layout(name))
    folder = layout("slow, added_tokens.json and the map", "slow")
    edit(folder, CONFIG, without)
    folder = layout("slow, as OpenHermes was", "slow")

    def hermes(was):
        for token in was["added_tokens_decoder"].values():
            token["special"] &= token["content"] != "<|im_start|>"
            token["normalized"] = not token["special"]
        return was | {"legacy": True, "additional_special_tokens": []}

    edit(folder, CONFIG, hermes)
    (folder / MAP).unlink()
    folder = layout("slow, added_tokens.json and no map", "slow")
    edit(
        folder, CONFIG, lambda was: {"tokenizer_class": "LlamaTokenizer", "eos_token": "<|im_end|>", "bos_token": "<s>"}
    )
    (folder / MAP).unlink()
    folder = layout("slow, no beginning", "slow")
    edit(folder, CONFIG, lambda was: was | {"add_bos_token": False})
    folder = layout("slow, no prefix space", "slow, not legacy")
    edit(folder, CONFIG, lambda was: was | {"add_prefix_space": False})
    slow = LlamaTokenizer(str(root / "model/tokenizer.model"), legacy=True)
    slow.chat_template = INST
    slow.save_pretrained(layout("slow, nothing added"))
    slow = LlamaTokenizer(str(root / "model/tokenizer.model"), legacy=False)
    slow.chat_template = INST
    slow.save_pretrained(layout("slow, nothing added, not legacy"))
    sentencepiece_model(root / "gemma model", pad_id=0, eos_id=1, bos_id=2, unk_id=3, add_dummy_prefix=False,
                        pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>",
                        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"])  # fmt: skip
    gemma = transformers.GemmaTokenizer(str(root / "gemma model/tokenizer.model"),
                                        additional_special_tokens=["<start_of_turn>", "<end_of_turn>"])  # fmt: skip
    gemma.chat_template = CHATML.replace("<|im_start|>", "<start_of_turn>").replace("<|im_end|>", "<end_of_turn>")
    gemma.save_pretrained(layout("gemma", kind="gemma"))
    shutil.rmtree(root / "gemma model")
    fast = LlamaTokenizerFast.from_pretrained(str(root / "slow"))
    fast.save_pretrained(layout("llama fast"))
    fast.save_pretrained(layout("llama fast, without a model"))
    (root / "llama fast, without a model/tokenizer.model").unlink(missing_ok=True)


def write5(root):
    """Layouts that transformers 5 writes."""
    for name in ("fast", "slow", "slow, not legacy", "gemma"):
        folder = root / f"5: {name}"
        transformers.AutoTokenizer.from_pretrained(root / name).save_pretrained(folder)
        shutil.copy(root / name / "config.json", folder)
    for old in ("fast",):
        folder = root / f"5: {old}, its tokenizer.json before"
        shutil.copytree(root / f"5: {old}", folder)
        (folder / "tokenizer.json").write_bytes((root / "plain/tokenizer.json").read_bytes())


def read(root, out):
    """{layout: what transformers makes of it}."""
    found = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if folder.name == "plain":
            continue  # what the others are made of; nothing says how it ends a text
        for kind in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
            try:
                found[folder.name] = facts(kind.from_pretrained(folder))
                break
            except Exception as error:  # of a class that this version does not have, or of a newer layout
                found[folder.name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    pathlib.Path(out).write_text(json.dumps(found, indent=1, sort_keys=True))


def facts(tokenizer):
    """Ids and names."""
    found = {
        "class": type(tokenizer).__name__,
        "ids": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS],
        "begin": tokenizer("The")["input_ids"][: -len(tokenizer("The", add_special_tokens=False)["input_ids"])],
        "bos": tokenizer.bos_token, "eos": tokenizer.eos_token, "eos_id": tokenizer.eos_token_id,
        "special": {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens},
        "added": tokenizer.get_added_vocab(), "template": tokenizer.chat_template,
    }  # fmt: skip
    if tokenizer.chat_template:
        made = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=True, return_dict=True)
        found["chat"] = made["input_ids"]
    return found


def pack(root, four, five, out):
    """All in one file."""
    name = lambda path: path.name
    files = {
        folder.name: {path.name: base64.b64encode(path.read_bytes()).decode() for path in sorted(folder.iterdir())}
        for folder in sorted((path for path in root.iterdir() if path.is_dir() and path.name != "plain"), key=name)
    }
    told = {n: json.loads(pathlib.Path(path).read_text()) for n, path in (("4", four), ("5", five))}
    content = json.dumps({"texts": TEXTS, "talk": TALK, "files": files, "expected": told}, sort_keys=True)
    pathlib.Path(out).write_bytes(gzip.compress(content.encode(), mtime=0))


if __name__ == "__main__":
    verb, folder, *rest = sys.argv[1:]
    {"write": write, "write5": write5, "read": read, "pack": pack}[verb](pathlib.Path(folder), *rest)
