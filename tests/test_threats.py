"""What a file, a name, a network or another user of the machine could do to a run, and that they cannot."""

import ast
import functools
import json
import os
import pathlib
import re
import stat
import tomllib

import pytest
import tiny
from damage import verify_shard
from test_layers import ROOT, imports, modules, relative

from jaxscale import main
from jaxscale.runtime.data.manifest import parse_manifest, write_manifest
from jaxscale.runtime.data.shard_writer import ShardWriter
from jaxscale.runtime.data.shards import encode_header, open_shard
from jaxscale.runtime.monitor.writers import json_record
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer
from jaxscale.settings.config_file import config_name
from jaxscale.system import local_server, paths
from jaxscale.system.exits import Exit, Stop, print_stderr
from jaxscale.system.process import environment, files_as, folder_mode
from jaxscale.system.redact import shown


@functools.cache
def trees():
    """(file, its syntax tree) of every module of the package."""
    return [(relative(path), ast.parse(path.read_text(encoding="utf-8"))) for path in modules()]


@functools.cache
def all_names():
    """{file: every name and text in it}."""
    return {file: set(names_used(tree)) for file, tree in trees()}


def names_used(tree):
    """Every dotted name and every text in a module: 'socket.create_server', 'trust_remote_code'."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else f".{node.attr}"
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_that_use(*wanted):
    return {file for file, names in all_names().items() if names & set(wanted)}


@pytest.mark.fault("H2")
def test_nothing_in_a_work_folder_is_run_when_a_run_goes_on(tmp_path):
    """A config.py planted there, or a config.json that wants to be code, is never executed: only the command's is."""
    workdir, trap = tmp_path / "run", tmp_path / "sprung"
    workdir.mkdir()
    for name in ("config.py", "sitecustomize.py", "tiny.py", "__init__.py"):
        (workdir / name).write_text(f"open({str(trap)!r}, 'w')\n")
    (workdir / "config.json").write_text(json.dumps({"config": {"seed": f"__import__('os').mkdir({str(trap)!r})"}}))
    (tmp_path / "tiny.py").write_text(f"def get_config():\n    return {tiny.VALUES!r}\n")
    with pytest.raises(Stop) as stop:
        main.main([f"--config={tmp_path / 'tiny.py'}", f"--workdir={workdir}"])
    assert stop.value.code is Exit.CONFIG_MISMATCH and not trap.exists()


@pytest.mark.fault("H3")
def test_no_tokenizer_and_no_data_set_may_bring_code():
    assert not files_that_use("trust_remote_code", "AutoTokenizer", "from_pretrained")


@pytest.mark.fault("H4")
@pytest.mark.parametrize(
    "path",
    ["configs/auto.py:../../../etc", "a.py:x=/y", "b.py:\x00\n\x1b[31m", "..py:..", "c.py:" + "x" * 500, "é b.py"],
)
def test_the_name_of_a_run_is_one_plain_folder(path):
    name = config_name(path)
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", name)
    assert pathlib.Path("/runs", name).resolve().parent == pathlib.Path("/runs")


def write_shard(folder, name="s"):
    tokenizer = ByteTokenizer()
    writer = ShardWriter(folder, name, vocab_size=257, eos_id=256, sources=["web"])
    for text in ("one", "two"):
        writer.add(tokenizer.encode(text), "web")
    about = {"name": "bytes", "eos_token": "", "vocab_size": 257, "fingerprint": tokenizer.fingerprint}
    files = [{"name": name, "source": "", "documents": 2}]
    writer.finish(None, {"tokenizer": about, "eos_id": 256, "text_bytes": 6, "skipped": {}, "files": files})


@pytest.mark.fault("H4")
@pytest.mark.parametrize("name", ["../outside.bin", "/etc/passwd", "sub/s.bin", ".."])
def test_a_shard_whose_header_leads_elsewhere_is_refused(tmp_path, name):
    write_shard(tmp_path)
    open_shard(tmp_path / "s.json")
    header = json.loads((tmp_path / "s.json").read_text())
    del header["sha256"]["json"]
    (tmp_path / "s.json").write_bytes(encode_header(header | {"bin": name}))  # by somebody who knows how
    for read in (open_shard, verify_shard):
        with pytest.raises(ValueError, match="which must be in the same folder|cannot be read|does not match"):
            read(tmp_path / "s.json")


@pytest.mark.fault("H4")
@pytest.mark.parametrize("name", ["../s", "/etc/s", "a/b", "..", ".hidden", "s\n", "s\x00"])
def test_a_manifest_lists_plain_names_alone(tmp_path, name):
    write_shard(tmp_path)
    content = json.loads(json.dumps(write_manifest(tmp_path, ["s"], recipe={}).content))
    parse_manifest("m", content)
    shard = content["shards"][0]
    files = {f"{name}{file[1:]}": about for file, about in shard["files"].items()}
    content["shards"][0] = shard | {"name": name, "files": files}
    with pytest.raises(ValueError, match="has invalid 'files' for shard"):
        parse_manifest("m", content)


@pytest.mark.fault("H7")
def test_a_run_s_folder_and_files_are_its_owner_s_alone_unless_told_otherwise(tmp_path):
    for text, folder, file in (("0700", 0o700, 0o600), ("0750", 0o750, 0o640), ("770", 0o770, 0o660)):
        mode = folder_mode(text)
        with files_as(mode):
            run = paths.make_run_dir(tmp_path / f"run{mode}", mode)
            paths.write_json(run / "config.json", {})
            (run / "metrics.jsonl").open("a").close()
            (run / "sub").mkdir()  # as a library makes it
        assert stat.S_IMODE(run.stat().st_mode) == folder == stat.S_IMODE((run / "sub").stat().st_mode)
        assert {stat.S_IMODE((run / name).stat().st_mode) for name in ("config.json", "metrics.jsonl")} == {file}
    before = os.umask(0o022)
    os.umask(before)
    assert before != 0o077  # and the process is as it was


@pytest.mark.fault("H7")
@pytest.mark.parametrize("text", ["0577", "9", "rwx", "07000", "", "0o700", "-1"])
def test_a_mode_that_is_none_or_shuts_out_the_owner_is_one_line(text):
    with pytest.raises(ValueError, match=f"--run_dir_mode={text} must be an octal mode"):
        folder_mode(text)


def parents(module):
    """'http.server.HTTPServer' -> {'http', 'http.server', ...}."""
    parts = module.split(".")
    return {".".join(parts[: i + 1]) for i in range(len(parts))}


@pytest.mark.fault("H8")
def test_nothing_listens_but_the_roll_call_and_nothing_serves_but_a_report_and_a_chat_on_loopback():
    ways = ("create_server", "bind", "listen")
    found = {file for file, names in all_names().items() if any(name.rpartition(".")[2] in ways for name in names)}
    assert found == {"jaxscale/runtime/hosts/roll_call.py", "jaxscale/runtime/hosts/exchange.py"}
    servers = {"aiohttp", "flask", "fastapi", "uvicorn", "tornado", "socketserver", "http.server", "xmlrpc"}
    serving = {file for file, tree in trees() for name, *_ in imports(tree, "jaxscale/x.py") if servers & parents(name)}
    assert serving == {"jaxscale/system/local_server.py"}
    assert local_server.ADDRESS == "127.0.0.1"
    anywhere = {
        "jaxscale/runtime/hosts/roll_call.py",
        "jaxscale/runtime/hosts/exchange.py",
    }  # where the name leads to loopback
    assert files_that_use("0.0.0.0") == anywhere


@pytest.mark.slow
@pytest.mark.fault("H8")
def test_the_coordinator_is_told_where_to_listen():
    """jax by itself listens on every interface, whatever address it was given."""
    calls = [
        (file, {keyword.arg for keyword in node.keywords})
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "jax.distributed.initialize"
    ]
    assert calls and all("coordinator_bind_address" in given for _, given in calls)


@pytest.mark.fault("H12")
def test_every_dependency_has_a_floor_and_a_ceiling():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [line for line in project["dependencies"] if not re.search(r">=[\d.]+.*,<\d", line)]
    assert not wanted
    extras = [line for group in project["optional-dependencies"].values() for line in group]
    loose = [line for line in extras if not line.startswith("jaxscale[") and not re.search(r">=[\d.]+", line)]
    assert not loose


@pytest.mark.fault("H12")
@pytest.mark.parametrize("version", ["311", "312"])
def test_the_constraints_name_every_dependency_with_hashes_and_no_index(version):
    text = (ROOT / "launch" / "constraints" / f"py{version}.txt").read_text()
    assert not re.search(r"://|--(extra-)?index-url|--find-links", text)
    pinned = dict(re.findall(r"^([a-z0-9-]+)(?:\[[a-z,]+\])?==([\w.]+) \\$", text, re.MULTILINE))
    blocks = [block for block in re.split(r"\n(?=[a-z])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)) if block]
    assert len(blocks) == len(pinned) and all(re.search(r"--hash=sha256:[0-9a-f]{64}", block) for block in blocks)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in (line.partition(";")[0] for line in project["dependencies"]):
        name, floor = re.match(r"([A-Za-z0-9-]+)(?:\[[a-z]+\])?>=([\d.]+)", line).groups()
        assert numbers(pinned[name.lower()]) >= numbers(floor), line
        assert numbers(pinned[name.lower()]) < numbers(line.rpartition("<")[2]), line


def numbers(version):
    return [int(part) for part in version.split(".") if part.isdigit()]


@pytest.mark.fault("H13")
def test_names_and_texts_cannot_break_a_line_or_drive_a_terminal(capsys):
    nasty = 'a\n{"step": 9}\x1b]0;title\x07\x1b[2J\u202e\r'
    line = json.dumps(json_record(1, {nasty: 1.0, "text": nasty}), allow_nan=False) + "\n"
    assert line.count("\n") == 1 and json.loads(line) == {"step": 1, nasty: 1.0, "text": nasty}
    print_stderr(f"error: {nasty}")
    told = capsys.readouterr().err
    assert told == f"error: {shown(nasty)}\n" and not set(told) & set("\x1b\x07\u202e\r")


@pytest.mark.fault("H14")
def test_nothing_is_kept_in_a_shared_tmp():
    assert not [name for names in all_names().values() for name in names if re.match(r"/(var/)?tmp(/|$)", name)]
    assert not files_that_use("tempfile.mktemp", "mktemp", "tempfile.gettempdir")


@pytest.mark.fault("H14")
def test_compiled_programs_lie_in_the_user_s_own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment()["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "jaxscale" / "compiled")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert environment()["JAX_COMPILATION_CACHE_DIR"].startswith(str(tmp_path / "home" / ".cache"))


@pytest.mark.fault("H14")
def test_a_file_that_is_being_replaced_cannot_be_foretold_or_led_astray(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / ".a.json.guessed.tmp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        paths.write_json(tmp_path / "a.json", 1)
    assert not (tmp_path / "elsewhere").exists()
