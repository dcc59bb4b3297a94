"""Ids, templates and end tokens equal transformers' for every layout of tokenizer files that it writes.

added_tokens.json.gz: folders and what transformers 4 and 5 make of them, by make_added_token_references.py. For models
of Llama with `legacy`, where a text after a token begins with a space, the two differ: ours are the ids of version 4,
which wrote such folders.
"""

import base64
import gzip
import json
import pathlib
import re

import pytest
import tokenizers

from jaxscale.runtime.text.chat.spans import open_prompts
from jaxscale.runtime.text.chat.template import Guard, load_template
from jaxscale.runtime.text.config import ChatConfig
from jaxscale.runtime.text.tokenizer.load import (
    bos_setting,
    find_template,
    load_tokenizer,
    naming_files,
    open_named,
    open_saved,
    read_settings,
    save_tokenizer,
)
from jaxscale.system.exits import BadInput

CONTRADICTION = "fast, a prefix space in the config"
MARKED = "fast, special in the config alone"  # <think> is special there, and so plain text in a message
IGNORED = "5: slow"  # version 5 reads what it wrote there with another pre_tokenizer than its tokenizer.json has
REFERENCE = json.loads(gzip.decompress((pathlib.Path(__file__).parent / "added_tokens.json.gz").read_bytes()))
LAYOUTS = sorted(REFERENCE["files"].keys() - {CONTRADICTION, IGNORED})


def write_layout(folder, layout):
    """The path of the tokenizer's file in a folder with the files of a layout."""
    folder.mkdir()
    for name, content in REFERENCE["files"][layout].items():
        (folder / name).write_bytes(base64.b64decode(content))
    return str(next(folder / name for name in ("tokenizer.json", "tokenizer.model") if (folder / name).exists()))


def expected(layout):
    """What transformers 4 makes of it, or version 5 where that has written it and version 4 cannot read it."""
    four, five = (REFERENCE["expected"][version][layout] for version in "45")
    return five if "error" in four else four


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_and_end_tokens_are_those_of_transformers(tmp_path, layout):
    tokenizer, told = load_tokenizer(write_layout(tmp_path / "hf", layout)), expected(layout)
    assert (tokenizer.eos_token, tokenizer.eos_id) == (told["eos"], told["eos_id"])
    special = {name: i for name, i in told["special"].items() if tokenizer.special_ids.get(name) != i}
    assert special == {}
    assert [*tokenizer.begin_ids] == told["begin"]
    pattern = Guard(tokenizer.special_ids).pattern  # which in a plain text are plain text
    for text, ids in zip(REFERENCE["texts"], told["ids"], strict=True):
        if not pattern.search(text):
            assert tokenizer.encode(text).tolist() == ids, text


@pytest.mark.cases(7)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "chat" in expected(name) and name != MARKED])
def test_prompts_of_chat_are_those_of_transformers(tmp_path, layout):
    pytest.importorskip("jinja2", reason="the extra chat")
    name, told = write_layout(tmp_path / "hf", layout), expected(layout)
    assert open_prompts(open_named(name, "", ""), "").ids(REFERENCE["talk"]) == told["chat"]


def test_where_version_5_ignores_a_part_of_the_tokenizer_json_that_it_wrote_ours_are_the_ids_of_the_file(tmp_path):
    path = write_layout(tmp_path / "hf", IGNORED)
    ours, theirs = load_tokenizer(path), tokenizers.Tokenizer.from_file(path)
    told = REFERENCE["expected"]["5"][IGNORED]
    assert (ours.eos_id, [*ours.begin_ids]) == (told["eos_id"], told["begin"])
    ids = [ours.encode(text).tolist() for text in REFERENCE["texts"]]
    assert ids == [theirs.encode(text, add_special_tokens=False).ids for text in REFERENCE["texts"]] != told["ids"]


def test_a_prefix_space_on_which_the_files_and_the_versions_differ_is_refused_by_name(tmp_path):
    four, five = (REFERENCE["expected"][version][CONTRADICTION]["ids"] for version in "45")
    assert four != five
    with pytest.raises(
        BadInput, match="tokenizer.json: its pre_tokenizer has add_prefix_space=False, but tokenizer_conf"
    ):
        load_tokenizer(write_layout(tmp_path / "hf", CONTRADICTION))


@pytest.mark.parametrize("layout", ["fast, added_tokens.json and the map", "slow", "slow, as OpenHermes was", "gemma"])
def test_a_run_saves_one_file_that_gives_the_same_ids(tmp_path, layout):
    tokenizer = load_tokenizer(write_layout(tmp_path / "hf", layout))
    save_tokenizer(tokenizer, tmp_path / "run")
    again = open_saved(tmp_path / "run", {}).tokenizer
    assert again.fingerprint == tokenizer.fingerprint and again.special_ids == tokenizer.special_ids
    ids = [tokenizer.encode(text).tolist() for text in REFERENCE["texts"]]
    assert [again.encode(text).tolist() for text in REFERENCE["texts"]] == ids
    name, content = tokenizer.saved_file()
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / name).write_bytes(content)  # as a prepared set has it
    begin = bos_setting([name for i in tokenizer.begin_ids for name, at in tokenizer.special_ids.items() if at == i])
    alone = load_tokenizer(str(tmp_path / "alone" / name), tokenizer.eos_token, begin)
    assert name == "tokenizer.json" and alone.fingerprint == tokenizer.fingerprint
    assert [alone.encode(text).tolist() for text in REFERENCE["texts"]] == ids


def test_another_token_next_to_the_file_is_another_tokenizer(tmp_path):
    path = write_layout(tmp_path / "hf", "fast, the map alone")
    before = load_tokenizer(path)
    (tmp_path / "hf/special_tokens_map.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}')
    after = load_tokenizer(path)
    assert before.fingerprint != after.fingerprint and after.special_ids["<|pad|>"] == 301
    assert pathlib.Path(path).with_name("added_tokens.json") not in naming_files(pathlib.Path(path))
    (tmp_path / "hf/added_tokens.json").write_text("{}")
    assert pathlib.Path(path).with_name("added_tokens.json") in naming_files(pathlib.Path(path))


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("added_tokens.json", {"<|im_end|>": 999}, "'<|im_end|>' has id 999 in the files next to the tokenizer"),
        ("added_tokens.json", {"<|im_end|>": "x"}, "token '<|im_end|>' has the invalid id 'x'"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "decoder in tokenizer_config.json must be"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": 1}}, "added_tokens_decoder: 300 1 must be a string"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": {"content": "a", "special": 3}}}, "be a string"),
    ],
)
def test_added_tokens_that_cannot_be_meant_are_refused_by_name(tmp_path, name, content, error):
    path = write_layout(tmp_path / "hf", "fast, the map alone")
    (tmp_path / "hf" / name).write_text(json.dumps(content))
    with pytest.raises(BadInput, match=re.escape(error)) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "error"), [("XLMRobertaTokenizer", "uses different token ids"), ("XLNetTokenizer", "")]
)
def test_a_model_whose_class_has_other_ids_is_refused_by_name(tmp_path, kind, error):
    path = write_layout(tmp_path / "hf", "slow, added_tokens.json and no map")
    (tmp_path / "hf/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    error = error or "files next to the model add the token '<|im_end|>', but added tokens are not supported"
    with pytest.raises(BadInput, match=re.escape(error)):
        load_tokenizer(path)


def test_a_word_that_is_only_named_as_padding_stays_a_word(tmp_path):
    path = write_layout(tmp_path / "hf", "fast, the map alone")
    before = load_tokenizer(path)
    (tmp_path / "hf/special_tokens_map.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "n"}')
    tokenizer = load_tokenizer(path)
    text = "an axis\n"
    assert "n" not in tokenizer.special_ids and tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).tolist() == before.encode(text).tolist()
    assert (tokenizer.token_bytes[tokenizer.encode("n")] == 1).all()


@pytest.mark.parametrize("name", ["dropout"])
def test_a_tokenizer_that_draws_its_ids_is_refused(tmp_path, name):
    path = pathlib.Path(write_layout(tmp_path / "hf", "fast"))
    spec = json.loads(path.read_text())
    path.write_text(json.dumps(spec | {"model": spec["model"] | {name: 0.1}}))
    with pytest.raises(BadInput, match=f"{name}=0.1.* which makes token ids random; set"):
        load_tokenizer(str(path))


def test_a_vocab_txt_is_read_as_do_lower_case_says(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nmesh\n")
    path = str(tmp_path / "vocab.txt")
    guessed = load_tokenizer(path)
    assert guessed.encode("Mesh").tolist() == [5]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert load_tokenizer(path).encode("Mesh mesh").tolist() == [1, 5]
    assert load_tokenizer(path).fingerprint != guessed.fingerprint


JINJA, MORE = "chat_template.jinja", "additional_chat_templates"
TEMPLATES = {  # files: the template, or its error; as named_templates of transformers
    "jinja over the config": ({JINJA: "j", "tokenizer_config.json": {"chat_template": "c"}}, "j"),
    "jinja over chat_template.json": ({JINJA: "j", "chat_template.json": {"chat_template": "p"}}, "j"),
    "the config over chat_template.json": (
        {"tokenizer_config.json": {"chat_template": "c"}, "chat_template.json": {"chat_template": "p"}}, "c",
    ),
    "chat_template.json alone": ({"chat_template.json": {"chat_template": "p"}}, "p"),
    "another default": ({JINJA: "j", f"{MORE}/default.jinja": "d"}, "d"),
    "more and jinja": ({JINJA: "j", f"{MORE}/rag.jinja": "r"}, "j"),
    "more alone": ({f"{MORE}/rag.jinja": "r", "tokenizer_config.json": {"chat_template": "c"}}, "rag, but none"),
    "a list": ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "l"}]}}, "l"),
    "none": ({"tokenizer_config.json": {"eos_token": "x"}}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", TEMPLATES)
def test_the_chat_template_is_the_one_that_transformers_takes(tmp_path, case):
    files, expected_template = TEMPLATES[case]
    (tmp_path / MORE).mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    if case == "more alone":
        with pytest.raises(BadInput, match=expected_template):
            find_template(read_settings(tmp_path))
        return
    found = find_template(read_settings(tmp_path))
    assert (found and found[0]) == expected_template


def test_a_conversation_with_tools_is_refused_where_the_folder_has_another_template_for_it(tmp_path):
    pytest.importorskip("jinja2", reason="the extra chat")
    path = write_layout(tmp_path / "hf", "fast")
    (tmp_path / "hf" / MORE).mkdir()
    (tmp_path / "hf" / MORE / "tool_use.jinja").write_text("{{ tools }}")
    template = load_template(load_tokenizer(path), ChatConfig())
    assert template.render(REFERENCE["talk"], None, False)
    with pytest.raises(BadInput, match="has tools, but .* has a separate template tool_use"):
        template.render(REFERENCE["talk"], [{"name": "f"}], False)
