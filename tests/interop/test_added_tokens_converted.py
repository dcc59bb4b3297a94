"""Tokens that stand only next to a tokenizer's file go through a conversion both ways, and into a prepared set."""

import base64
import gzip
import io
import json
import pathlib

import numpy as np
import pytest
import tokenizers
from hf_folders import LLAMA, make_folder

from jaxscale import schema
from jaxscale.cli import convert
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.text.tokenizer.load import load_tokenizer, open_saved, save_tokenizer
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.corpus.prepare.engine import make_plan, prepare
from jaxscale.tools.corpus.prepare.local import LocalExecutor
from jaxscale.tools.corpus.prepare.progress import PrepareProgress

PACKED = pathlib.Path(__file__).parent.parent / "text" / "added_tokens.json.gz"
REFERENCE = json.loads(gzip.decompress(PACKED.read_bytes()))
TEXTS = [text for text in REFERENCE["texts"] if text]


def write_layout(folder, layout):
    """Adds the tokenizer's files of a layout to a folder."""
    folder.mkdir(exist_ok=True)
    for name, content in REFERENCE["files"][layout].items():
        if name != "config.json":
            (folder / name).write_bytes(base64.b64decode(content))


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", ["fast, added_tokens.json and the map", "fast, the end in the config alone", "slow"])
def test_a_conversion_keeps_the_ids_of_added_tokens_and_the_end(tmp_path, layout):
    told = REFERENCE["expected"]["4"][layout]
    make_folder(tmp_path / "hf", LLAMA | {"vocab_size": 344, "eos_token_id": told["eos_id"]}, np.dtype("<f4"))
    write_layout(tmp_path / "hf", layout)
    assert convert.main([f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'run'}"]) == 0
    saved = open_saved(tmp_path / "run", {})
    assert saved.tokenizer.eos_token == "<|im_end|>" and saved.stop_ids == (told["eos_id"],)
    assert saved.tokenizer.special_ids["<|im_start|>"] == told["special"]["<|im_start|>"]
    assert convert.main([f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"]) == 0
    for name in REFERENCE["files"][layout]:
        if name != "config.json":
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    out = next(path for name in ("tokenizer.json", "tokenizer.model") if (path := tmp_path / "out" / name).exists())
    assert [load_tokenizer(str(out)).encode(text).tolist() for text in TEXTS] == [
        ids for text, ids in zip(REFERENCE["texts"], told["ids"], strict=True) if text
    ]
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == told["eos_id"]


@pytest.mark.parametrize("layout", ["fast, the map alone", "slow"])
def test_an_export_of_a_run_has_one_tokenizer_json_with_all_tokens(tmp_path, layout):
    """A run saves the tokenizer as one file, which an export has with the others."""
    write_layout(tmp_path / "from", layout)
    name = "tokenizer.model" if layout == "slow" else "tokenizer.json"
    tokenizer = load_tokenizer(str(tmp_path / "from" / name))
    save_tokenizer(tokenizer, tmp_path / "run")
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "run/tokenizer/tokenizer.json"))
    special = REFERENCE["expected"]["4"][layout]["special"]
    assert {name: made.token_to_id(name) for name in special} == special
    assert not (tmp_path / "run/tokenizer/tokenizer.model").exists()


@pytest.mark.slow
def test_a_prepared_set_has_the_tokenizer_with_its_added_tokens(tmp_path):
    write_layout(tmp_path / "from", "slow")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text * 20}) + "\n" for text in TEXTS))
    values = {"sources": {"text": {"files": str(tmp_path / "a.jsonl")}}, "stages": ()}
    values["tokenizer"] = {"name": str(tmp_path / "from/tokenizer.model")}
    with LocalExecutor(1) as executor:
        prepare(
            make_plan(schema.from_dict(PrepareConfig, values)),
            tmp_path / "set",
            executor,
            PrepareProgress(io.StringIO()),
        )
    entry = json.loads((tmp_path / "set/manifest.json").read_text())["tokenizer"]
    tokenizer = load_tokenizer(str(tmp_path / "from/tokenizer.model"))
    assert (entry["file"], entry["eos_token"], entry["fingerprint"]) == (
        "tokenizer.json", "<|im_end|>", tokenizer.fingerprint,
    )  # fmt: skip
    cfg = DataConfig(name="tokens", files=str(tmp_path / "set/manifest.json"), cache_dir=str(tmp_path / "cache"))
    corpus = open_data(cfg, seq_len=16, vocab_size=344, seed=0, say=lambda line: None)
    assert corpus.tokenizer is not None and corpus.tokenizer.eos_id == tokenizer.eos_id
    assert [corpus.tokenizer.encode(text).tolist() for text in TEXTS] == [
        tokenizer.encode(text).tolist() for text in TEXTS
    ]
