"""A process works whatever it is started from: closed or full standard streams, any locale, optimized Python."""

import ast
import json
import os
import pathlib
import random
import subprocess
import sys

import pytest
import tiny

from jaxscale.cli import VERBS
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

PACKAGE = pathlib.Path(paths.__file__).parents[1]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}  # names of files are ASCII, and UTF-8 mode is off


def jaxscale(words, streams="", python=(), **env):
    """A command in a process of its own. streams: redirections as bash writes them."""
    command = ["bash", "-c", f'exec "$@" {streams}', "bash", sys.executable, *python, "-m", "jaxscale.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **env}
    return subprocess.run(command, capture_output=True, env=environment, timeout=900)


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """The words of a command that trains two steps."""
    folder = tmp_path_factory.mktemp("surroundings")
    (folder / "text.txt").write_text(" ".join(random.Random(0).choices("def return import".split(), k=400)))
    values = tiny.VALUES | dict(
        model=tiny.LLAMA | dict(vocab_size=272, num_layers=1),
        train_tokens="2 steps",
        data=dict(files=str(folder / "text.txt"), cache_dir=str(folder / "cache")),
        monitor=dict(tensorboard=False, log_every_steps=1),
        optim=dict(warmup_tokens="1 steps"),
        mesh=dict(data=1, fsdp=1),
    )
    (folder / "tiny.py").write_text(f"def get_config():\n    return {values!r}\n")
    return ["train", f"--config={folder / 'tiny.py'}"]


def steps_of(workdir):
    lines = (workdir / "metrics.jsonl").read_text("utf-8").splitlines()
    saved = [path.name for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()]
    return [record["step"] for record in map(json.loads, lines) if "loss" in record], saved


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_ends_no_command(streams):
    done = jaxscale(["--help"], streams)
    assert done.returncode == 0 and b"Traceback" not in done.stderr


@pytest.mark.soak
def test_training_needs_no_standard_stream(training, tmp_path):
    done = jaxscale([*training, f"--workdir={tmp_path / 'run'}"], "<&- >&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert steps_of(tmp_path / "run") == ([1, 2], ["2"])


@pytest.mark.soak
def test_training_works_in_a_folder_that_the_locale_cannot_spell_under_optimized_python_and_a_full_stdout(
    training, tmp_path
):
    workdir = tmp_path / "läuf"
    done = jaxscale([*training, f"--workdir={workdir}"], ">/dev/full", ["-OO"], **ASCII)
    assert done.returncode == 0, done.stderr
    assert steps_of(workdir) == ([1, 2], ["2"])
    assert done.stderr.decode().count("No space left on device; progress is still in metrics.jsonl") == 1
    assert b"Traceback" not in done.stderr


def test_a_full_standard_output_is_one_line_and_exit_2():
    done = jaxscale(["--help"], ">/dev/full")
    (line,) = done.stderr.decode().splitlines()
    assert done.returncode == 2
    assert line == (
        "error: cannot write to standard output: No space left on device; free disk space, or redirect the "
        "output to a different file"
    )


def test_a_full_standard_error_changes_no_exit_code():
    assert jaxscale(["verfy"], "2>/dev/full").returncode == 2


def test_text_that_the_encoding_of_stdout_lacks_is_escaped():
    code = "from jaxscale.system import exits, process; process.open_standard_streams(); exits.put('läuf')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, cwd=PACKAGE.parent)
    assert (done.stdout, done.stderr) == (b"l\\xe4uf\n", b"")


def test_python_that_ignores_its_environment_is_refused_before_anything_is_done():
    done = jaxscale(["watch", "--help"], "", ["-X", "utf8=0"], LC_ALL="C")
    assert done.returncode == 2 and b"omit its flags" in done.stderr and b"Traceback" not in done.stderr


def test_a_work_folder_whose_name_is_not_utf8_is_refused(tmp_path):
    workdir = tmp_path / os.fsdecode(b"l\xe4uf")
    with pytest.raises(BadInput, match=r"l\\udce4uf is not UTF-8, .*; rename it"):
        paths.make_run_dir(workdir)
    assert not workdir.exists()


def test_a_program_in_another_locale_refuses_a_work_folder_with_the_setting_that_helps(tmp_path):
    code = "import sys; from jaxscale.system import paths; paths.make_run_dir(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path / "läuf")]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **ASCII}, cwd=PACKAGE.parent)
    assert b"Python decodes file names as ascii: set PYTHONUTF8=1" in done.stderr
    assert not (tmp_path / "läuf").exists()


def opened_in_the_locales_encoding(source):
    """Lines of calls that read or write text without naming its encoding."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        modes = [ast.unparse(arg).strip("'") for arg in call.args] + [given.get("mode", "").strip("'")]
        is_text = {
            "open": any(mode and set(mode) <= set("rwaxt+") for mode in modes) or isinstance(call.func, ast.Name)
            and len(call.args) == 1 and "mode" not in given,
            "read_text": not call.args,
            "write_text": len(call.args) == 1,
            "fdopen": "b" not in "".join(modes[1:]),
        }.get(name, given.get("text") == "True" or "universal_newlines" in given)  # fmt: skip
        if is_text and "encoding" not in given:
            found.append(call.lineno)
    return found


@pytest.mark.slow
def test_every_text_is_read_and_written_with_a_named_encoding():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        for line in opened_in_the_locales_encoding(path.read_text("utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("open(path)", 1),
        ("path.open('w')", 1),
        ("path.read_text()", 1),
        ("path.write_text(text)", 1),
        ("subprocess.run(command, text=True)", 1),
        ("open(path, 'rb')\nopen(path, encoding='utf-8')\npath.read_text('utf-8')\nstore.open(name)", 0),
    ],
)
def test_text_in_the_locales_encoding_is_seen(source, seen):
    assert len(opened_in_the_locales_encoding(source)) == seen


@pytest.mark.slow
def test_every_verb_prints_its_page_without_a_traceback_where_docstrings_are_dropped_and_the_locale_is_ascii():
    done = jaxscale([next(iter(VERBS)), "--help"], "", ["-OO"], **ASCII)
    assert done.returncode == 0 and done.stderr == b"" and b"--config=FILE" in done.stdout
