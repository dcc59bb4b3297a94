"""The folder of a tokenizer says how texts begin and end, of a converted model and of a run, moved or not."""

import json

import chat_tokenizers
import pytest
import tokenizers
from damage import DAMAGES, in_time

from jaxscale.runtime.text.tokenizer.load import (
    ByteTokenizer,
    find_template,
    load_tokenizer,
    open_saved,
    read_folder,
    save_tokenizer,
)
from jaxscale.system.exits import BadInput


@pytest.fixture
def folder(tmp_path):
    """A converted model's tokenizer, in which <|im_start|> begins every text."""
    path = chat_tokenizers.write_folder(tmp_path / "tokenizer", chat_tokenizers.CHATML)
    made = tokenizers.Tokenizer.from_file(path)
    first = made.token_to_id("<|im_start|>")
    single = dict(single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)])
    made.post_processor = tokenizers.processors.TemplateProcessing(**single)
    made.save(path)
    (tmp_path / "tokenizer/generation_config.json").write_text(json.dumps({"eos_token_id": [257, 259]}))
    return tmp_path


def test_the_folder_of_a_converted_model_says_how_texts_begin_and_end(folder):
    kept = open_saved(folder, {})
    assert kept.tokenizer.encode("<|im_start|>").tolist() != [258]  # in a text it is text
    assert (kept.tokenizer.begin_ids, kept.stop_ids) == ((258,), (257, 259))
    assert find_template(kept.about)[0] == chat_tokenizers.CHATML
    settings = {"add_bos_token": False, "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer/chat_template.jinja").write_text("own")
    kept = open_saved(folder, {})
    assert (kept.tokenizer.begin_ids, kept.stop_ids) == ((), (259, 257)) and find_template(kept.about)[0] == "own"


def test_a_run_keeps_its_tokenizer_and_its_texts_begin_as_its_documents_did(folder, tmp_path):
    save_tokenizer(load_tokenizer(str(folder / "tokenizer/tokenizer.json")), tmp_path / "run")
    kept = open_saved(tmp_path / "run", {"tokenizer": "/gone/tokenizer.json"})
    assert kept.tokenizer.begin_ids == (258,) and kept.stop_ids == (257, 259)
    assert find_template(kept.about)[0] == chat_tokenizers.CHATML
    without = load_tokenizer(str(folder / "tokenizer/tokenizer.json"), bos_token="none")
    save_tokenizer(without, tmp_path / "none")
    assert open_saved(tmp_path / "none", {}).tokenizer.begin_ids == ()
    file = tmp_path / "run/tokenizer/tokenizer.json"
    file.write_text(file.read_text().replace("<|im_end|>", "<|im_close|>"))
    with pytest.raises(ValueError, match="tokenizer.json is not the file that the run saved"):
        open_saved(tmp_path / "run", {})


def test_what_a_run_keeps_follows_what_it_is_trained_with_next(folder, tmp_path):
    tokenizer = load_tokenizer(str(folder / "tokenizer/tokenizer.json"))
    chat = {"template": "a", "variables": {"x": 1}, "today": "", "fingerprint": "1"}
    save_tokenizer(tokenizer, tmp_path / "run")
    save_tokenizer(tokenizer, tmp_path / "run", chat)
    kept = open_saved(tmp_path / "run", {})
    assert find_template(kept.about)[0] == "a" and kept.tokenizer.begin_ids == (258,)
    assert kept.about.note["chat"]["variables"] == {"x": 1}
    save_tokenizer(tokenizer, tmp_path / "run", chat | {"template": "b", "fingerprint": "2"})
    assert find_template(open_saved(tmp_path / "run", {}).about)[0] == "b"


def test_folders_without_a_tokenizer_use_what_the_settings_name(tmp_path):
    assert open_saved(tmp_path, {"name": "stdlib", "tokenizer": ""}).tokenizer.name == "bytes"
    assert open_saved(tmp_path, {"name": "tokens", "tokenizer": ""}) is None
    assert open_saved(tmp_path, {"name": "files", "tokenizer": ""}).tokenizer.name == "bytes"  # of an older version
    assert open_saved(tmp_path, {"name": "files", "tokenizer": "", "ids_field": ""}) is None  # it had token ids
    with pytest.raises(ValueError, match="has no folder tokenizer/, and data.tokenizer=/gone.json does not exist"):
        open_saved(tmp_path, {"name": "tokens", "tokenizer": "/gone.json"})
    save_tokenizer(ByteTokenizer(), tmp_path)
    assert open_saved(tmp_path, {"name": "tokens", "tokenizer": ""}).tokenizer.name == "bytes"
    (tmp_path / "tokenizer/jaxscale.json").unlink()
    (tmp_path / "tokenizer/tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="contains none of tokenizer.json"):
        read_folder(tmp_path / "tokenizer")


@pytest.mark.fault("F38")
@pytest.mark.parametrize("damage", ["tail flipped", "cut in half", "emptied", "deleted", "a dangling link", "a FIFO"])
@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_a_damaged_file_that_a_run_has_kept_is_named_and_the_run_that_goes_on_brings_it_back(folder, name, damage):
    tokenizer = load_tokenizer(str(folder / "tokenizer/tokenizer.json"))
    chat = {"template": "a", "variables": {}, "today": "", "fingerprint": "1"}
    save_tokenizer(tokenizer, folder / "run", chat)
    path = folder / "run/tokenizer" / name
    was = path.read_bytes()
    DAMAGES[damage](path)
    with in_time(), pytest.raises(BadInput, match=name) as error:
        open_saved(folder / "run", {})
    assert "\n" not in str(error.value)
    if damage != "a FIFO":
        save_tokenizer(tokenizer, folder / "run", chat)
        assert path.read_bytes() == was and open_saved(folder / "run", {}).stop_ids == (257, 259)
