"""A tokenizer that loses text is reported before anything is trained: how much, of what kind, with examples."""

import io
import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from jaxscale import schema
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.tokenize import open_tokenized
from jaxscale.runtime.text.sources.files import list_files
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer, load_tokenizer
from jaxscale.runtime.text.tokenizer.loss import compare, measure_loss
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.corpus.prepare.engine import make_plan, prepare
from jaxscale.tools.corpus.prepare.local import LocalExecutor
from jaxscale.tools.corpus.prepare.progress import PrepareProgress

ENGLISH = ["the mesh says where an axis lives"] * 5
GERMAN = ["für über größe äußerst schön hübsch"] * 9


def byte_level(path, alphabet=(), **model):
    """A byte-level BPE trained on English alone; without the alphabet it knows no other byte."""
    made = tokenizers.Tokenizer(models.BPE(**model))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", *model.values()]
    how = dict(vocab_size=400, special_tokens=special, initial_alphabet=list(alphabet), show_progress=False)
    made.train_from_iterator(ENGLISH, trainers.BpeTrainer(**how))
    made.save(str(path))
    return str(path)


def sentence_like(path, *, normalizer=None, unknown="<unk>"):
    """A Unigram model of the letters of ENGLISH, with a space before a text."""
    letters = sorted(set("".join(ENGLISH)) - {" "}) + ["▁"]
    made = tokenizers.Tokenizer(models.Unigram([(unknown, 0.0), *((letter, -1.0) for letter in letters)], unk_id=0))
    made.normalizer = normalizer
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens([AddedToken(unknown), AddedToken("</s>")])
    made.save(str(path))
    return str(path)


def test_bytes_that_a_vocabulary_lacks_vanish_and_are_counted(tmp_path):
    tokenizer = load_tokenizer(byte_level(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("für")) != "für"  # nothing tells so
    loss = measure_loss(tokenizer, GERMAN)
    assert loss.is_much and loss.texts == 9 and loss.characters == 9 * len(GERMAN[0])
    assert loss.letters["ü"] == 9 * 3 and loss.lost == loss.kinds["missing"]
    line = loss.line("data.tokenizer=t", tokenizer.loss_reason)
    assert "\n" not in line and "'für über größe" in line and "lacks" in line and "initial_alphabet" in line
    assert f"{loss.lost / loss.characters:.1%} of the {loss.characters:,} characters of 9 sampled texts" in line
    assert not measure_loss(tokenizer, ENGLISH).lost  # of what it knows nothing is lost


@pytest.mark.parametrize("kind", ["bytes", "whole alphabet", "prefix space"])
def test_a_tokenizer_that_gives_texts_back_loses_nothing(tmp_path, kind):
    if kind == "prefix space":
        tokenizer, texts = load_tokenizer(sentence_like(tmp_path / "tokenizer.json")), ENGLISH
    else:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        path = byte_level(tmp_path / "tokenizer.json", alphabet)
        tokenizer, texts = (ByteTokenizer() if kind == "bytes" else load_tokenizer(path)), [*GERMAN, *ENGLISH]
    loss = measure_loss(tokenizer, texts)
    assert loss.lost == 0 and not loss.is_much and loss.texts > 0 and tokenizer.loss_reason == ""


def test_unknown_letters_case_accents_and_white_space_are_told_apart(tmp_path):
    unknown = load_tokenizer(sentence_like(tmp_path / "unknown.json"))
    loss = measure_loss(unknown, ["the mesh ß says"])
    assert dict(loss.kinds) == {"missing": 1} and dict(loss.letters) == {"ß": 1}
    by_design = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
    lower = load_tokenizer(sentence_like(tmp_path / "lower.json", normalizer=by_design))
    assert dict(measure_loss(lower, ["The MÉSH"]).kinds) == {"changed by its normalizer": 5}
    stripped = load_tokenizer(sentence_like(tmp_path / "strip.json", normalizer=normalizers.Strip()))
    assert dict(measure_loss(stripped, ["the mesh \n"]).kinds) == {"white space": 2}


def test_what_comes_in_addition_is_no_loss_and_an_example_shows_the_place():
    assert compare("a b", " a  b ").lost == 0
    text = "x" * 100 + "für alle"
    loss = compare(text, text.replace("ü", ""))
    assert loss.lost == 1 and not loss.is_much
    assert loss.example == ("x" * 9 + "für alle", "x" * 9 + "fr alle")


def lines_of_training(tmp_path, path, texts):
    """What is said while files are tokenized."""
    (tmp_path / "raw").mkdir(exist_ok=True)
    (tmp_path / "raw" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    said, cfg = [], DataConfig(cache_dir=str(tmp_path / "cache"))
    files, _ = list_files(str(tmp_path / "raw" / "*.jsonl"), "data.files", "text")
    open_tokenized(files, load_tokenizer(path), cfg, said.append)
    return [line for line in said if "loses text" in line]


def test_training_warns_above_one_percent_and_tells_of_less(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json")
    (line,) = lines_of_training(tmp_path, path, GERMAN)
    assert line.startswith(f"WARNING: data.tokenizer={path} loses text: ")
    (line,) = lines_of_training(tmp_path, path, [*ENGLISH * 3, "the mesh: "])
    assert not line.startswith("WARNING") and "1 missing" in line
    assert lines_of_training(tmp_path, path, ENGLISH) == []


def prepared(tmp_path, path, texts, **options):
    """The lines of a preparation."""
    if not (tmp_path / "raw").exists():
        (tmp_path / "raw").mkdir()
        (tmp_path / "raw" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    values = {"sources": {"text": {"files": str(tmp_path / "raw" / "*.jsonl")}}, "stages": ()}
    cfg = schema.from_dict(PrepareConfig, values | {"tokenizer": {"name": path}})
    said = io.StringIO()
    with LocalExecutor(1) as executor:
        prepare(make_plan(cfg), tmp_path / "set", executor, PrepareProgress(said), **options)
    return [line for line in said.getvalue().splitlines() if "loses text" in line]


def test_prepare_refuses_much_loss_with_strict_and_warns_without(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json")
    with pytest.raises(BadInput, match="tokenizer.name=.* loses text: .*omit --strict to prepare it anyway"):
        prepared(tmp_path, path, GERMAN, strict=True)
    assert not (tmp_path / "set" / "manifest.json").exists()
    (line,) = prepared(tmp_path, path, GERMAN)
    assert "WARNING: tokenizer.name=" in line and "initial_alphabet" in line
    assert "the tokenizer loses text" in (tmp_path / "set" / "report.html").read_text()
    with pytest.raises(BadInput, match="the dataset's tokenizer loses text"):  # of a set that is finished
        prepared(tmp_path, path, GERMAN, strict=True)


def test_a_little_loss_passes_strict(tmp_path):
    (line,) = prepared(tmp_path, byte_level(tmp_path / "tokenizer.json"), [*ENGLISH * 3, "the mesh: "], strict=True)
    assert "WARNING" not in line
