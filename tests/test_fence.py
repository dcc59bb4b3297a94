"""Whoever writes in a guarded folder asks its lock first; all writers are found by reading the source."""

import ast
import math
import os
import pathlib

import pytest

from jaxscale.runtime.monitor.events import Events
from jaxscale.runtime.monitor.records import append, replace_with_copy
from jaxscale.runtime.monitor.sinks import TensorBoard
from jaxscale.runtime.monitor.writers import open_records
from jaxscale.system import fence, paths
from jaxscale.system.exits import Exit, Stop

PACKAGE = pathlib.Path(paths.__file__).parent.parent
RUNTIME = PACKAGE / "runtime"
WRITES = {"write_text", "write_bytes", "mkdir", "unlink", "rmdir", "rename", "rmtree"}
OWN = {  # functions that write and do not ask, and why they need not
    "runtime/checkpoint/lock_stores.py": "the lock itself, which is only replaced as a whole",

    "runtime/checkpoint/write.py:write_step_metadata": "for commit, which asks, in a folder that is held open",
    "runtime/checkpoint/folders.py:mark_committed": "for commit, which asks",

    "runtime/checkpoint/folders.py:commit": "of averages, copies and imports, which are programs of their own",
    "runtime/checkpoint/retention.py:unpin": "a verb on checkpoints, a program of its own",
    "runtime/hosts/watchdog.py:open_stacks": "its own file, made when a run begins; expire asks",
    "runtime/hosts/watchdog.py:remove_if_empty": "its own empty file",
    **{f"runtime/checkpoint/local_{place}": "this host's own copies, which no other owner of the work folder writes"
       for place in ("copy.py:clear", "copy.py:keep_only", "copy.py:write_copy")},
    **{f"runtime/hosts/exchange.py:{name}": "files of a neighbour's local copies, in this host's own folder"
       for name in ("receive", "answer", "get")},
    "runtime/hosts/agree.py:check_shared": "its own mark, when a run begins",
    "runtime/monitor/sinks.py:begin_file": "its own file, behind make_folder, which asks",
    "system/paths.py:locked": "an empty file that is made to be locked",
    "runtime/monitor/profile.py:upload": "removes a folder of this machine's /tmp",
}  # fmt: skip
# The verbs on checkpoints, and conversions: programs of their own, in folders that no run writes.
OTHER_PROGRAMS = {f"runtime/checkpoint/{name}.py" for name in ("derived_weights", "transfer")}


def raw_writes():
    """Yields 'file:function' of each function that writes files by itself and does not ask before it does."""
    rooms = [RUNTIME / room for room in ("checkpoint", "monitor", "hosts", "training", "run")]
    files = [file for room in rooms for file in room.rglob("*.py")]
    files.append(PACKAGE / "system" / "paths.py")
    for file in files:
        name = file.relative_to(PACKAGE).as_posix()
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and name not in OTHER_PROGRAMS | set(OWN):
                calls = [call for call in ast.walk(function) if isinstance(call, ast.Call)]
                asked = [call.lineno for call in calls if ast.unparse(call.func) == "fence.ask"]
                written = [call.lineno for call in calls if writes(call)]
                if written and min(asked, default=math.inf) > min(written):
                    yield f"{name}:{function.name}"


def writes(call):
    called = ast.unparse(call.func)
    mode = [a.value for a in call.args[1:2] if isinstance(a, ast.Constant)] if called == "open" else []
    if called == "os.open":
        return "O_CREAT" in ast.unparse(call)
    own = called.startswith(("paths.", "self.attempt", "file.write_text", "sink.", "service."))
    return (
        called == "os.replace"
        or called.rpartition(".")[2] in WRITES
        and not own
        or any(set(m) & set("wax") for m in mode)
    )


@pytest.mark.fault("F32")
def test_every_writer_of_a_work_folder_asks():
    assert set(raw_writes()) - set(OWN) == set()


class Gate:
    """A lock that is lost when `lost` is set."""

    def __init__(self):
        self.lost = False

    def __call__(self):
        if self.lost:
            raise Stop(Exit.LOCK_HELD, "taken over")


@pytest.fixture
def gate(tmp_path):
    gate = Gate()
    with fence.fenced(tmp_path / "run", gate):
        (tmp_path / "run").mkdir()
        yield gate


@pytest.mark.fault("F32")
def test_what_is_open_or_waits_in_memory_is_not_written_after_the_loss(tmp_path, gate):
    run = tmp_path / "run"
    board, lines, events = (
        TensorBoard(run / "tensorboard"),
        open_records(run / "metrics.jsonl", 0)[0],
        Events(run, primary=True),
    )
    board.write(1, {"loss": 1.0})
    lines.write({"step": 1})
    events.note("started", 0)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    lines.unwritten.append("kept from a disk that was full\n")
    board.flushed_at = 0.0  # what it is given waits in memory until it is time to write
    gate.lost = True
    for write in (
        lambda: board.write(2, {"loss": 1.0}),
        lambda: lines.write({"step": 2}),
        lambda: events.note("alarm", 2),
        lambda: paths.write_text_atomic(run / "new", "x"),
        lambda: paths.make_private(run / "folder"),
        lambda: append(run / "new", b"x"),
    ):
        with pytest.raises(Stop, match="taken over"):
            write()
    assert lines.flush(1)
    for one in (board, lines, events):
        one.close()
    events.note("stopped", 2)  # of an end that goes on
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    paths.write_text_atomic(tmp_path / "elsewhere", "x")
    assert fence.ask(tmp_path / "running") is False


@pytest.mark.fault("F32")
def test_a_line_that_was_under_way_goes_into_the_file_that_was_replaced(tmp_path):
    file = tmp_path / "metrics.jsonl"
    append(file, b'{"step": 1}\n')
    zombie = os.open(file, os.O_WRONLY | os.O_APPEND)
    replace_with_copy(file)
    append(file, b'{"step": 2}\n')
    os.write(zombie, b"stale\n")
    os.close(zombie)
    assert file.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    replace_with_copy(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
