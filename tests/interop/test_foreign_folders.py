"""A folder that came from elsewhere leads to no file outside it, whatever links, pipes and devices lie in it."""

import json
import os
import pathlib

import pytest
from hf_folders import make_folder

from jaxscale.cli import convert
from jaxscale.runtime.text.tokenizer.load import (
    find_template,
    load_tokenizer,
    open_saved,
    read_settings,
    save_tokenizer,
)
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop import tokenizer_files

pytestmark = pytest.mark.fault("H15")
SECRET = "the content of a file of this machine"
CHAT = "{{ messages[0].content }}"
TEXTS = (
    "chat_template.jinja", "additional_chat_templates/default.jinja", "chat_template.json", "vocab.json", "merges.txt",
    "generation_config.json",
)  # fmt: skip

SMALL = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=257, hidden_size=16, intermediate_size=24,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=256,
)  # fmt: skip


def with_tokenizer(folder, **more):
    """A model's folder with a tokenizer that works."""
    make_folder(folder, **more)
    (folder / "tokenizer.json").write_text(tokenizer_files.byte_level())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


def outside(tmp_path, content=SECRET):
    """A file that belongs to somebody else."""
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / "secret.json").write_text(content)
    return tmp_path / "home" / "secret.json"


def bring_in(folder, workdir):
    return convert.main([f"--from={folder}", f"--workdir={workdir}", "--json"])


@pytest.mark.cases(2)
@pytest.mark.parametrize("how", ["absolute", "relative", "a link to a link", "through a linked folder"])
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "config.json", "model.safetensors"])
def test_a_link_that_leads_out_of_a_folder_is_not_followed(tmp_path, name, how):
    folder = with_tokenizer(tmp_path / "hf", config=SMALL)
    secret = outside(tmp_path, (folder / name).read_bytes().decode("latin-1") if (folder / name).exists() else SECRET)
    (folder / name).unlink(missing_ok=True)
    if how == "relative":
        secret = pathlib.Path("..") / "home" / "secret.json"
    elif how == "a link to a link":
        (folder / "notes.txt").symlink_to(secret)
        secret = "notes.txt"
    elif how == "through a linked folder":
        (folder / "more").symlink_to(secret.parent)
        secret = "more/secret.json"
    (folder / name).symlink_to(secret)
    with pytest.raises(BadInput, match=f"{name} is a link to .*home/secret.json, outside its folder; to use"):
        bring_in(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", TEXTS)
def test_no_small_file_is_copied_through_a_link(tmp_path, name):
    folder = with_tokenizer(tmp_path / "hf", config=SMALL)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(outside(tmp_path))
    with pytest.raises(BadInput, match="outside its folder"):
        bring_in(folder, tmp_path / "run")
    assert not any(SECRET in path.read_text(errors="ignore") for path in tmp_path.rglob("run/**/*") if path.is_file())


def test_the_hub_s_own_cache_and_a_folder_that_is_itself_a_link_are_read(tmp_path):
    made = with_tokenizer(tmp_path / "made", config=SMALL, files=2)
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(made.iterdir())):
        path.rename(repository / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    (tmp_path / "link").symlink_to(snapshot)
    assert bring_in(tmp_path / "link", tmp_path / "run") == 0
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").is_file()
    load_tokenizer(str(snapshot / "tokenizer.json"))
    (snapshot / "chat_template.jinja").symlink_to("../../../../home/secret.json")
    outside(tmp_path)
    with pytest.raises(BadInput, match="outside its folder"):
        bring_in(tmp_path / "link", tmp_path / "other")
    (snapshot / "chat_template.jinja").unlink()
    (repository / "refs").write_text(SECRET)
    (snapshot / "chat_template.jinja").symlink_to("../../refs")  # of the repository, and no blob
    with pytest.raises(BadInput, match="outside its folder"):
        bring_in(tmp_path / "link", tmp_path / "other")


def test_links_inside_a_folder_are_read(tmp_path):
    folder = with_tokenizer(tmp_path / "hf", config=SMALL)
    (folder / "real").mkdir()
    (folder / "tokenizer.json").rename(folder / "real" / "t.json")
    (folder / "tokenizer.json").symlink_to("real/t.json")
    assert bring_in(folder, tmp_path / "run") == 0


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_what_has_no_end_is_not_waited_for(tmp_path, name):
    folder = with_tokenizer(tmp_path / "hf", config=SMALL)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(BadInput, match=f"{name} cannot be read: it is a folder, a pipe or a device"):
        find_template(read_settings(folder))
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(BadInput, match=f"{name} is a link to .*, outside its folder"):
        find_template(read_settings(folder))
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    with pytest.raises(BadInput, match=f"{name} cannot be read: Too many levels"):
        find_template(read_settings(folder))


def test_a_pipe_that_is_named_like_a_file_of_ours_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(BadInput, match="config.json cannot be read: it is a folder, a pipe"):
        paths.read_json(tmp_path / "config.json")


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_work_folder_that_came_from_elsewhere_is_not_followed_either(tmp_path, linked):
    """Neither by what reads its tokenizer, nor by an export, which would send it on."""
    source = with_tokenizer(tmp_path / "hf", config=SMALL)
    run = tmp_path / "run"
    save_tokenizer(load_tokenizer(str(source / "tokenizer.json")), run)
    if linked == "file":
        (run / "tokenizer" / "chat_template.jinja").symlink_to(outside(tmp_path))
    else:
        (run / "tokenizer").rename(tmp_path / "home")
        (run / "tokenizer").symlink_to(tmp_path / "home")
    with pytest.raises(BadInput, match=", outside "):
        find_template(open_saved(run, {}).about)
    with pytest.raises(BadInput, match=", outside "):
        tokenizer_files.export_files(run, {"config": {}})


def test_a_tokenizer_s_neighbours_are_not_copied_into_a_run_through_links(tmp_path):
    source = with_tokenizer(tmp_path / "hf", config=SMALL)
    tokenizer = load_tokenizer(str(source / "tokenizer.json"))
    (source / "chat_template.jinja").symlink_to(outside(tmp_path))
    with pytest.raises(BadInput, match="outside its folder"):
        save_tokenizer(tokenizer, tmp_path / "run")
    assert not (tmp_path / "run" / "tokenizer" / "chat_template.jinja").exists()


@pytest.mark.slow
def test_links_of_older_downloads_into_the_hub_s_cache_are_read_and_to_no_other_file_there(tmp_path, monkeypatch):
    folder = with_tokenizer(tmp_path / "hf", config=SMALL)
    blobs = tmp_path / "home/hub/models--org--name/blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        blob = blobs / f"{number:0{64 if path.suffix == '.safetensors' else 40}x}"
        path.rename(blob)
        path.symlink_to(blob)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(BadInput, match="outside its folder.*cp -rL .*/hf NEW"):
        bring_in(folder, tmp_path / "run")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert bring_in(folder, tmp_path / "run") == 0
    for place in ("home/token", "home/hub/models--org--name/refs/main", "home/hub/models--org--name/blobs/secret"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(SECRET)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        (folder / "chat_template.jinja").symlink_to(tmp_path / place)
        with pytest.raises(BadInput, match="outside its folder"):
            bring_in(folder, tmp_path / "other")


@pytest.mark.parametrize("kind", ["file", "two links", "the hub's cache", "a store without names"])
def test_a_tokenizer_that_a_person_names_may_be_a_link_to_anywhere(tmp_path, kind):
    real = with_tokenizer(tmp_path / "real", config=SMALL) / "tokenizer.json"
    link = tmp_path / "work" / "tokenizer.json"
    link.parent.mkdir()
    expected = CHAT if kind != "a store without names" else None
    (real.parent / "chat_template.jinja").write_text(CHAT)
    if kind == "two links":
        (tmp_path / "work" / "between.json").symlink_to("../real/tokenizer.json")
        link.symlink_to("between.json")
    elif kind == "the hub's cache":
        snapshot, blobs = (tmp_path / "models--org--name" / name for name in ("snapshots/1", "blobs"))
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for path in (real, real.parent / "chat_template.jinja"):
            path.rename(blobs / path.stem)
            (snapshot / path.name).symlink_to(f"../../blobs/{path.stem}")
        link.symlink_to(snapshot / "tokenizer.json")
    elif kind == "a store without names":
        (tmp_path / "store").mkdir()
        real.rename(tmp_path / "store" / "abc")
        link.symlink_to(tmp_path / "store" / "abc")
    else:
        link.symlink_to(real)
    save_tokenizer(load_tokenizer(str(link)), tmp_path / "run")
    kept = open_saved(tmp_path / "run", {})
    found = find_template(kept.about)
    assert kept.tokenizer.encode("a").tolist() == [97] and (found and found[0]) == expected
    assert open_saved(tmp_path / "none", {}, named=str(link)).tokenizer.name == str(link)


def test_a_work_folder_s_tokenizer_is_no_link_out_when_it_is_named_either(tmp_path):
    real = with_tokenizer(tmp_path / "real", config=SMALL) / "tokenizer.json"
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "tokenizer").mkdir()
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").symlink_to(real)
    with pytest.raises(BadInput, match="outside its folder"):
        load_tokenizer(str(tmp_path / "run" / "tokenizer" / "tokenizer.json"))
