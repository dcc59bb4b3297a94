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
        "after a restart, the run ends with the losses, batches and state of an uninterrupted run",
    ),
    "F2": Row(
        "a bit flips in a checkpoint's files",
        "always detected, never trained on: an older step is restored, or exit 19",
    ),
    "F3": Row(
        "stop and resume at steps where off-by-one errors are likely",
        "the same batches and the same state, bit for bit",
    ),
    "F4": Row(
        "the disk is full",
        "reported with its cause within one step; older steps remain; the next save that fits succeeds",
    ),
    "F5": Row("SIGTERM to one of two processes", "both save the same step and exit with 10; the resumed run is exact"),
    "F6": Row("SIGTERM to a single process", "the same"),
    "F7": Row(
        "SIGKILL of one of several processes",
        "the others name it and exit with 13 within 5 s; the run can be resumed",
    ),
    "F8": Row(
        "a process hangs in data, step, save, restore or evaluation",
        "stacks of all threads on disk, exit 15 within the time budget",
    ),
    "F9": Row("a write fails in one process only", "nothing is committed; every process reports the cause"),
    "F10": Row(
        "a gradient is NaN",
        "the step is skipped and changes nothing; if repeated, exit 17 naming step and leaf",
    ),
    "F11": Row("the loss spikes", "rewind to an earlier checkpoint, skip the batches around the spike, log both"),
    "F12": Row(
        "resume with other devices, meshes or processes",
        "the state bit for bit, the same global batches, losses equal up to summation order",
    ),
    "F13": Row(
        "a setting differs from the folder's run",
        "exit 11 with the setting, old and new value; --allow_change permits and logs it; arrays are never cast",
    ),
    "F14": Row(
        "the data differ from those of the run's first step",
        "exit 12 before the first step, naming the file, shard or setting",
    ),
    "F15": Row(
        "two runs in one folder",
        "the second exits with 18 and names the first; the lock of a dead run is taken over",
    ),
    "F16": Row("kill -9 of a run in a bucket", "as F1"),
    "F17": Row(
        "the bucket returns 429 or 5xx, breaks connections, loses responses, or is slow",
        "no save is lost, and the step never waits for the bucket",
    ),
    "F18": Row(
        "the bucket is unreachable or denies access",
        "training continues, saves resume; exit 14 after the time limit; a missing permission is reported immediately",
    ),
    "F19": Row(
        "truncated, missing, empty and foreign files among the checkpoints",
        "never used as a checkpoint; foreign files are not touched",
    ),
    "F20": Row("a damaged record next to the arrays", "always detected by its sha256"),
    "F21": Row("a machine freezes and wakes up", "the others exit; the machine that wakes up cannot write"),
    "F22": Row("the first process dies", "the others exit with 13 and name it"),
    "F23": Row(
        "a data worker dies or the trainer is killed",
        "the error names shard and tokens; no process is left behind",
    ),
    "F24": Row(
        "invalid records: bytes, lengths, ids, decompression bombs",
        "skipped and counted, or rejected with file and position, depending on the policy",
    ),
    "F25": Row(
        "one device computes a wrong bit",
        "exit 16 naming the device, unless repeating the steps gives the right result",
    ),
    "F26": Row("a folder is read-only, inaccessible or missing", "reported before compilation; during the run as F4"),
    "F27": Row("clocks jump or disagree", "nothing is deleted, timed out or taken over because of it"),
    "F28": Row(
        "a run crashes repeatedly before its first save",
        "the supervisor backs off, gives up, and reports the reason",
    ),
    "F29": Row(
        "a secret in the environment, a script in a document",
        "the secret is never written; the script is shown as text",
    ),
    "F30": Row("minutes of random faults", "ends with the losses and state of a run without faults"),
    "F31": Row(
        "a checkpoint was moved, copied or linked to another step number",
        "reported and moved aside; never trained on, sampled, evaluated or exported as that step",
    ),
    "F32": Row("a process that lost its lock wakes up", "it writes nothing: metrics, events or checkpoints"),
    "F33": Row("a checkpoint's file list or commit marker is deleted or changed", "detected and reported"),
    "F34": Row(
        "the work folder is renamed or deleted during training",
        "exit 14 with the cause; nothing is created at the old path",
    ),
    "F35": Row("the lock is a dangling link, a folder or a FIFO", "a one-line error; no endless loop, no traceback"),
    "F36": Row("the disk has no inodes left", "reported as such"),
    "F37": Row("a signal during the final sample or export", "exit 10, or 0 if everything is saved"),
    "F38": Row(
        "shards, manifests, lineage or cached tokens are damaged, swapped or point outside their folder",
        "detected before any of their tokens is trained on",
    ),
    "F39": Row(
        "a defect in jaxscale, with any exception class",
        "exit 1 with its traceback; never reported as the user's mistake",
    ),
    "F41": Row(
        "a host's local copy is damaged, or the host is replaced",
        "reported; the run uses the neighbor's copy, else the previous copy, else the work folder's checkpoint",
    ),
    "F42": Row("local copies of discarded steps, of another run, or of a process that had lost the lock", "never used"),
}
THREATS = {
    "H1": Row(
        "code in a checkpoint, tokenizer or array file",
        "no unpickling, no torch.load, no eval of file contents",
    ),
    "H2": Row("a config is Python code", "only local files are executed, never files in a work folder or bucket"),
    "H3": Row(
        "a tokenizer with code, or a replaced tokenizer",
        "tokenizer code is never executed; the sha256 is compared on resume",
    ),
    "H4": Row("path traversal in file names", "only plain names in manifests, shard headers and run names"),
    "H5": Row(
        "files that decompress to more than the memory",
        "limits on files, documents and lines; errors name file and position",
    ),
    "H6": Row(
        "secrets in logs, records and reports", "settings with a recognized secret are rejected; all output is redacted"
    ),
    "H7": Row(
        "files that other users of the machine can read",
        "the run's folder has mode 0700 and its files 0600, unless --run_dir_mode changes it",
    ),
    "H8": Row(
        "open ports",
        "listens only on the interface of the run, without other servers; local copies need a secret",
    ),
    "H9": Row(
        "scripts from documents in HTML reports",
        "everything is escaped in one function; the page cannot load or run anything",
    ),
    "H10": Row("replaced objects in a bucket", "sizes and sha256 of the manifest are compared on open"),
    "H11": Row("access tokens sent to another address", "endpoints other than this machine are rejected"),
    "H12": Row("changed dependencies", "lower and upper bounds; versions are logged at each start, with changes"),
    "H13": Row(
        "text that controls the terminal or breaks a log",
        "control characters are removed from output; records are JSON",
    ),
    "H14": Row(
        "races in /tmp",
        "nothing is stored there; compiled programs are in the user's cache and the work folder",
    ),
    "H15": Row("symbolic links in a downloaded folder", "no file outside the folder is read"),
    "H16": Row(
        "malicious names and texts in pages, model cards, terminals and logs",
        "escaped for each format: HTML, Markdown, control and bidirectional characters",
    ),
    "H17": Row(
        "decompression bombs in evaluation files, endless templates, nested JSON, absurd sizes",
        "limits on memory and time; a one-line error, exit 2",
    ),
    "H18": Row("idle and slow clients of a local page", "limited; the page stays responsive"),
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
