"""Faults and threats by number: what happens, what is promised, and which tests of the tree say that they cover it."""

import ast
import pathlib
from typing import NamedTuple

TESTS = pathlib.Path(__file__).parent.parent


class Row(NamedTuple):
    """A fault or threat."""

    what: str
    promise: str


FAULTS = {
    "F1": Row(
        "kill -9 at every named point of a save",
        "after a restart, the same losses, batches and state as an uninterrupted run",
    ),
    "F2": Row(
        "a bit flips in a checkpoint's files",
        "detected and never trained on: an older step is restored, or exit 19",
    ),
    "F3": Row(
        "stop and resume at steps where off-by-one errors are likely",
        "the same batches and state, bit for bit",
    ),
    "F4": Row(
        "the disk is full",
        "reported within one step; older steps remain; the next save that fits works",
    ),
    "F5": Row("SIGTERM to one of two processes", "both save the same step and exit with 10; resume is exact"),
    "F6": Row("SIGTERM to a single process", "the same"),
    "F7": Row(
        "SIGKILL of one of several processes",
        "the others name it and exit with 13 within 5 s; the run can be resumed",
    ),
    "F8": Row(
        "a process hangs in data, step, save, restore or evaluation",
        "all stacks on disk, exit 15 within the time limit",
    ),
    "F9": Row("a write fails in one process", "nothing is committed; all report the cause"),
    "F10": Row(
        "a gradient is NaN",
        "the step is skipped; if repeated, exit 17 naming step and parameter",
    ),
    "F11": Row("the loss spikes", "rewind and skip the batches around the spike"),
    "F12": Row(
        "resume with other devices, meshes or processes",
        "the same state and batches, losses equal up to summation order",
    ),
    "F13": Row(
        "a setting changed",
        "exit 11 with old and new value, unless allowed by --allow_change; arrays are never cast",
    ),
    "F14": Row(
        "the data changed",
        "exit 12 before the first step, naming the difference",
    ),
    "F15": Row(
        "two runs in one folder",
        "the second exits with 18; the lock of a dead run is taken over",
    ),
    "F16": Row("kill -9 of a run in a bucket", "as F1"),
    "F17": Row(
        "the bucket returns 429 or 5xx, breaks connections, or is slow",
        "no save is lost; training never waits for the bucket",
    ),
    "F18": Row(
        "the bucket is unreachable or denies access",
        "training continues, saves resume; exit 14 after the time limit; missing permissions are reported",
    ),
    "F19": Row(
        "truncated, missing, empty or foreign files among checkpoints",
        "never used; foreign files are not touched",
    ),
    "F20": Row("a damaged record next to the arrays", "detected by its sha256"),
    "F21": Row("a machine freezes and wakes up", "the others exit; that machine cannot write after it wakes"),
    "F22": Row("the first process dies", "the others exit with 13 and name it"),
    "F23": Row(
        "a data worker dies or the trainer is killed",
        "the error names shard and tokens; no process remains",
    ),
    "F24": Row(
        "invalid records: bytes, lengths, ids, decompression bombs",
        "skipped and counted, or rejected with file and position",
    ),
    "F25": Row(
        "one device computes a wrong bit",
        "exit 16 naming the device, unless repeated steps are right",
    ),
    "F26": Row("a folder is read-only, inaccessible or missing", "reported before compilation; during the run as F4"),
    "F27": Row("clocks jump or disagree", "nothing is deleted, timed out or taken over"),
    "F28": Row(
        "a run crashes repeatedly before its first save",
        "the supervisor backs off and gives up",
    ),
    "F29": Row(
        "a secret in the environment; a script in a document",
        "never written; shown as text",
    ),
    "F30": Row("minutes of random faults", "as F1"),
    "F31": Row(
        "a checkpoint is moved, copied or linked to another step number",
        "moved aside; never used as that step",
    ),
    "F32": Row("a process that lost its lock wakes up", "it writes nothing"),
    "F33": Row("a checkpoint's file list or commit marker is damaged", "detected and reported"),
    "F34": Row(
        "the work folder is renamed or deleted",
        "exit 14; nothing is created at the old path",
    ),
    "F35": Row("the lock is a dangling link, a folder or a FIFO", "a one-line error"),
    "F36": Row("the disk has no inodes left", "reported as such"),
    "F37": Row("a signal during the final sample or export", "exit 10, or 0 if all is saved"),
    "F38": Row(
        "shards, manifests or cached tokens are damaged, swapped or point outside their folder",
        "detected before training on them",
    ),
    "F39": Row(
        "a defect in jaxscale",
        "exit 1 with its traceback",
    ),
    "F41": Row(
        "a host's local copy is damaged, or the host is replaced",
        "reported; the neighbor's copy is used, else the previous one, else the checkpoint",
    ),
    "F42": Row("local copies of discarded steps, another run, or a process that had lost the lock", "never used"),
}
THREATS = {
    "H1": Row(
        "code in a checkpoint, tokenizer or array file",
        "no unpickling, torch.load or eval of files",
    ),
    "H2": Row("a config is Python code", "only local files outside work folders are executed"),
    "H3": Row(
        "a tokenizer with code, or a replaced tokenizer",
        "never executed; the sha256 is compared on resume",
    ),
    "H4": Row("path traversal in file names", "only plain names are accepted"),
    "H5": Row(
        "files that decompress beyond memory",
        "limits on files, documents and lines; errors name file and position",
    ),
    "H6": Row(
        "secrets in logs, records and reports", "settings with a recognized secret are rejected; output is redacted"
    ),
    "H7": Row(
        "files readable by other users",
        "folders have mode 0700, files 0600; set by --run_dir_mode",
    ),
    "H8": Row(
        "open ports",
        "listens only on the run's interface; local copies need a secret",
    ),
    "H9": Row(
        "scripts from documents in HTML reports",
        "escaped; the page cannot load or run anything",
    ),
    "H10": Row("replaced objects in a bucket", "sizes and sha256 are compared on open"),
    "H11": Row("access tokens sent to another address", "endpoints other than Google and this machine are rejected"),
    "H12": Row("changed dependencies", "version bounds; versions are logged at each start"),
    "H13": Row(
        "text that controls the terminal or breaks a log",
        "control characters are removed; records are JSON",
    ),
    "H14": Row(
        "races in /tmp",
        "nothing is stored there",
    ),
    "H15": Row("symbolic links in a downloaded folder", "no file outside the folder is read"),
    "H16": Row(
        "malicious names and texts in pages, terminals and logs",
        "escaped: HTML, Markdown, control and bidirectional characters",
    ),
    "H17": Row(
        "decompression bombs, endless templates, nested JSON, huge sizes",
        "limits on memory and time; exit 2",
    ),
    "H18": Row("idle and slow clients of a local page", "the page stays responsive"),
}
ALL = FAULTS | THREATS


def covering(tests: pathlib.Path = TESTS) -> dict[str, list[str]]:
    """{fault: ['train/test_x.py::test_name', ...]} of every test that is marked, soak tests too; read, not run."""
    found: dict[str, list[str]] = {}
    for file in sorted(tests.rglob("test_*.py")):
        for name, faults in marked(ast.parse(file.read_text(encoding="utf-8"))):
            for fault in faults:
                found.setdefault(fault, []).append(f"{file.relative_to(tests).as_posix()}::{name}")
    return found


def marked(tree: ast.Module) -> list[tuple[str, list[str]]]:
    """(name, faults) of each test function, with what its class or `pytestmark` of its file says."""
    found = []
    common = [
        fault
        for node in tree.body
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "pytestmark" for target in node.targets)
        for fault in named(node.value)
    ]

    def visit(body: list[ast.stmt], prefix: str, outer: list[str]) -> None:
        for node in body:
            own = [fault for mark in getattr(node, "decorator_list", ()) for fault in named(mark)]
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}::", outer + own)
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                if faults := list(dict.fromkeys(outer + own)):
                    found.append((prefix + node.name, faults))

    visit(tree.body, "", common)
    return found


def named(node: ast.AST) -> list[str]:
    """The faults of all pytest.mark.fault("F1", ...) inside the node, those of single parameters among them."""
    return [
        argument.value
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "fault"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    ]
