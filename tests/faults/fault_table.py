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
        "SIGKILL at any named point of a save",
        "losses, batches and state are those of an uninterrupted run",
    ),
    "F2": Row(
        "a bit flips in a checkpoint's files",
        "restores an older checkpoint, or exits with 19",
    ),
    "F3": Row(
        "stop and resume at steps where off-by-one errors are likely",
        "batches and state are equal, bit for bit",
    ),
    "F4": Row(
        "the disk is full",
        "reports this within one step; keeps older checkpoints; the next save that fits succeeds",
    ),
    "F5": Row(
        "SIGTERM to one of two processes",
        "both processes save the same step and exit with 10; resume is exact",
    ),
    "F6": Row(
        "SIGTERM to a single process",
        "as in F5",
    ),
    "F7": Row(
        "SIGKILL of one of several processes",
        "the other processes name it and exit with 13 within 5 s; resume is possible",
    ),
    "F8": Row(
        "a process hangs in data, step, save, restore or evaluation",
        "writes all stacks; exits with 15 within the time limit",
    ),
    "F9": Row(
        "a write fails in one process",
        "commits nothing; all processes report the cause",
    ),
    "F10": Row(
        "a gradient is NaN",
        "skips the step; after repeats, exits with 17 and names step and parameter",
    ),
    "F11": Row(
        "the loss spikes",
        "rewinds and skips the batches around the spike",
    ),
    "F12": Row(
        "a resume with different devices, meshes or processes",
        "the same state and batches; losses are equal up to summation order",
    ),
    "F13": Row(
        "a setting changed",
        "exits with 11 and both values, unless --allow_change permits it; never casts arrays",
    ),
    "F14": Row(
        "the data changed",
        "exits with 12 before the first step; names the difference",
    ),
    "F15": Row(
        "two runs use one folder",
        "the second run exits with 18; a dead run's lock is taken over",
    ),
    "F16": Row(
        "SIGKILL of a run in a bucket",
        "as in F1",
    ),
    "F17": Row(
        "the bucket returns 429 or 5xx, breaks connections, or is slow",
        "no save is lost; training never waits for the bucket",
    ),
    "F18": Row(
        "the bucket is unreachable or denies access",
        "continues training and saves later; after a time limit, exits with 14; reports missing permissions",
    ),
    "F19": Row(
        "truncated, missing, empty or foreign files among checkpoints",
        "never uses them; keeps foreign files unchanged",
    ),
    "F20": Row(
        "a damaged record next to the arrays",
        "detects this by sha256",
    ),
    "F21": Row(
        "a machine freezes and wakes up",
        "the other processes exit; the machine writes nothing afterwards",
    ),
    "F22": Row(
        "the first process dies",
        "the other processes name it and exit with 13",
    ),
    "F23": Row(
        "a data worker dies, or the trainer is killed",
        "the error names shard and tokens; no process remains",
    ),
    "F24": Row(
        "invalid records: bytes, lengths, ids, decompression bombs",
        "skips and counts, or rejects them with file and position",
    ),
    "F25": Row(
        "one device computes a wrong bit",
        "exits with 16 and names the device, unless the repeated step is correct",
    ),
    "F26": Row(
        "a folder is read-only, inaccessible or missing",
        "reports this before compilation; during the run, as in F4",
    ),
    "F27": Row(
        "clocks jump or disagree",
        "nothing is deleted, timed out or taken over",
    ),
    "F28": Row(
        "a run crashes repeatedly before its first save",
        "the supervisor waits, then gives up",
    ),
    "F29": Row(
        "secrets in the environment; scripts in documents",
        "secrets are never written; scripts are shown as text",
    ),
    "F30": Row(
        "minutes of random faults",
        "as in F1",
    ),
    "F31": Row(
        "a checkpoint is moved, copied or linked to another step number",
        "moves it aside; never uses it as that step",
    ),
    "F32": Row(
        "a process that lost its lock wakes up",
        "writes nothing",
    ),
    "F33": Row(
        "a checkpoint's file list or commit marker is damaged",
        "detects and reports this",
    ),
    "F34": Row(
        "the work folder is renamed or deleted",
        "exits with 14; creates nothing at the old path",
    ),
    "F35": Row(
        "the lock is a dangling link, a folder or a FIFO",
        "prints a one-line error",
    ),
    "F36": Row(
        "the disk has no inodes left",
        "reports this cause",
    ),
    "F37": Row(
        "a signal arrives during the final sample or export",
        "exits with 10, or 0 if everything is saved",
    ),
    "F38": Row(
        "shards, manifests or cached tokens are damaged, swapped or point outside their folder",
        "detects this before training uses the data",
    ),
    "F39": Row(
        "jaxscale has a defect",
        "exits with 1 and a traceback",
    ),
    "F41": Row(
        "a host's local copy is damaged, or the host is replaced",
        "uses the neighbor's copy, else the previous copy, else the checkpoint",
    ),
    "F42": Row(
        "local copies of discarded steps, another run, or a process that had lost the lock",
        "never uses them",
    ),
}
THREATS = {
    "H1": Row(
        "code in a checkpoint, tokenizer or array file",
        "no unpickling, torch.load or eval of files",
    ),
    "H2": Row(
        "a config is Python code",
        "only local files outside work folders are executed",
    ),
    "H3": Row(
        "a tokenizer with code, or a replaced tokenizer",
        "code is never executed; the sha256 is compared on resume",
    ),
    "H4": Row(
        "path traversal in file names",
        "only plain names are accepted",
    ),
    "H5": Row(
        "files that decompress beyond memory",
        "files, documents and lines have limits; errors name file and position",
    ),
    "H6": Row(
        "secrets in logs, records and reports",
        "settings with a recognized secret are rejected; output is redacted",
    ),
    "H7": Row(
        "files readable by other users",
        "folders have mode 0700, files 0600; --run_dir_mode changes this",
    ),
    "H8": Row(
        "open ports",
        "processes listen only on the run's interface; local copies need a secret",
    ),
    "H9": Row(
        "scripts from documents in HTML reports",
        "escaped; the page cannot load or run anything",
    ),
    "H10": Row(
        "replaced objects in a bucket",
        "sizes and sha256 are compared when opened",
    ),
    "H11": Row(
        "access tokens sent to another address",
        "endpoints other than Google and this machine are rejected",
    ),
    "H12": Row(
        "changed dependencies",
        "versions have bounds and are logged at each start",
    ),
    "H13": Row(
        "text that controls the terminal or breaks a log",
        "control characters are removed; records are JSON",
    ),
    "H14": Row(
        "files planted in /tmp",
        "nothing is stored there",
    ),
    "H15": Row(
        "symbolic links in a downloaded folder",
        "no file outside the folder is read",
    ),
    "H16": Row(
        "malicious names and texts in pages, terminals and logs",
        "HTML, Markdown, control and bidirectional characters are escaped",
    ),
    "H17": Row(
        "decompression bombs, endless templates, nested JSON, huge sizes",
        "memory and time are limited; exit 2",
    ),
    "H18": Row(
        "idle and slow clients of a local page",
        "the page stays responsive",
    ),
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
