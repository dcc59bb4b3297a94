"""A process says in one line, and with its exit code, why it ended."""

import io
import os
import subprocess
import sys

import pytest

from jaxscale import schema
from jaxscale.system.exits import Exit, Stop, run_and_exit


def leave(main):
    with pytest.raises(SystemExit) as left:
        run_and_exit(main)
    return left.value.code


def stop(code, message):
    raise Stop(code, message)


def test_a_main_that_returns_nothing_is_done(capsys):
    assert leave(lambda argv: None) == 0
    assert capsys.readouterr() == ("", "")


def test_the_code_that_main_returns_is_the_exit_code():
    assert leave(lambda argv: Exit.NO_GO) == 3


def test_main_gets_the_arguments_without_the_program_name(monkeypatch):
    monkeypatch.setattr("sys.argv", ["jaxscale", "plan", "--config=x"])
    seen = []
    leave(seen.extend)
    assert seen == ["plan", "--config=x"]


@pytest.mark.parametrize("code", list(Exit))
def test_a_stop_leaves_with_its_code_and_one_line(code, capsys):
    assert leave(lambda argv: stop(code, "runs/x holds another config; use another workdir")) == int(code)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"stopped ({code.name.lower()}, exit {int(code)}): runs/x holds another config; use another workdir\n"


def test_a_value_error_of_ours_is_one_line_and_exit_2(capsys):
    assert leave(lambda argv: schema.convert("many", int, "model.num_layers")) == Exit.BAD_INPUT
    assert capsys.readouterr().err == "error: model.num_layers='many' is not an integer\n"


def test_a_value_error_from_inside_a_library_keeps_its_traceback():
    with pytest.raises(ValueError, match="invalid literal"):
        run_and_exit(lambda argv: int("x"))


def test_any_other_error_keeps_its_traceback():
    with pytest.raises(KeyError):
        run_and_exit(lambda argv: {}["x"])


def test_the_codes_a_supervisor_relies_on_do_not_move():
    assert {code.name: int(code) for code in Exit} == {
        "DONE": 0, "ERROR": 1, "BAD_INPUT": 2, "NO_GO": 3, "PREEMPTED": 10, "CONFIG_MISMATCH": 11, "DATA_MISMATCH": 12,
        "PEER_LOST": 13, "STORAGE": 14, "HANG": 15, "SILENT_CORRUPTION": 16, "NON_FINITE": 17, "LOCK_HELD": 18,
        "CHECKPOINT_CORRUPT": 19,
    }  # fmt: skip


def interrupt(argv):
    raise KeyboardInterrupt


def test_ctrl_c_is_one_line_and_the_code_that_shells_give_it(capsys):
    assert leave(interrupt) == 130
    assert capsys.readouterr().err == "stopped (interrupted, exit 130)\n"


def command(*words, code=None):
    """A process of ours, its output in pipes. code: Python to run instead of a module."""
    start = ["-c", code] if code else ["-m", *words]
    return [sys.executable, *start]


@pytest.mark.soak  # test_cli does it without a process, and its test of both doors starts one of such a module
def test_a_wrong_verb_of_a_module_run_by_itself_is_one_line():
    done = subprocess.run(command("jaxscale.cli", "verify", "foo"), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (
        2, "error: jaxscale verify has no verb 'foo'; verbs: resume, parity\n"
    )  # fmt: skip


@pytest.mark.parametrize("lines, unbuffered, code", [(1, "", 0), (100_000, "", 141), (1, "1", 141)])
def test_a_reader_that_goes_away_ends_a_process_without_a_word(lines, unbuffered, code):
    source = f"from jaxscale.system.exits import run_and_exit; run_and_exit(lambda argv: print('a line\\n' * {lines}))"
    read, write = os.pipe()
    os.close(read)  # before the process writes anything: what `| head` comes to
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        command(code=source), env=environment, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_pipe_that_breaks_elsewhere_keeps_its_traceback(monkeypatch):
    def main(argv):
        raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", io.StringIO())
    with pytest.raises(BrokenPipeError):
        run_and_exit(main)
