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
        "started again, the run ends with the losses, batches and state of one that was never killed",
    ),
    "F2": Row(
        "one bit of a checkpoint's files flips",
        "found every time and never trained on: an older step, or exit 19",
    ),
    "F3": Row(
        "stopped and started at steps that are easily got wrong",
        "the same batches and the same state, bit for bit",
    ),
    "F4": Row(
        "the disk is full",
        "told within a step with the cause; older steps stay; the next save that fits succeeds",
    ),
    "F5": Row("SIGTERM to one of two processes", "both save the same step and leave with 10; going on is exact"),
    "F6": Row("SIGTERM to a single process", "the same"),
    "F7": Row(
        "SIGKILL of one of several processes",
        "the others name it and leave with 13 within 5 s; the run goes on",
    ),
    "F8": Row(
        "a process hangs in data, step, save, restore, evaluation",
        "stacks of all threads on disk, exit 15 in time",
    ),
    "F9": Row("a write fails in one process alone", "nothing is committed; every process tells that one's cause"),
    "F10": Row(
        "a gradient is not a number",
        "the step is skipped and changes nothing; repeated, exit 17 naming step and leaf",
    ),
    "F11": Row("the loss jumps", "back to a checkpoint before it, the batches around it left out, all of it on record"),
    "F12": Row(
        "going on with other devices, meshes or processes",
        "the state bit for bit, the global batches the same, losses apart by the order of sums",
    ),
    "F13": Row(
        "a setting differs from the folder's run",
        "exit 11 with setting, old and new; by --allow_change it may, on record; arrays are never cast",
    ),
    "F14": Row(
        "the data differ from those the run began with",
        "exit 12 before the first step, naming file, shard or setting",
    ),
    "F15": Row("two runs in one folder", "the second leaves with 18 naming the first; a dead one's lock is taken over"),
    "F16": Row("kill -9 of a run in a bucket", "as F1"),
    "F17": Row(
        "the bucket answers 429 and 5xx, breaks connections, loses answers, or is slow",
        "no save is lost, and the step never waits for it",
    ),
    "F18": Row(
        "the bucket is away, or forbids",
        "training goes on; saves resume; too long: 14; a missing right is named at once",
    ),
    "F19": Row(
        "truncated, missing, empty and foreign files among the steps",
        "never taken for a step; foreign ones untouched",
    ),
    "F20": Row("a damaged record beside the arrays", "found every time by its sha256"),
    "F21": Row("a machine freezes and wakes up", "the others leave; the one that wakes may not write any more"),
    "F22": Row("the first process dies", "the others leave with 13 and a line that names it"),
    "F23": Row(
        "a reader of data dies or the trainer is killed",
        "the error names shard and tokens; no process is left behind",
    ),
    "F24": Row(
        "bad records: bytes, lengths, ids, bombs",
        "by policy skipped and counted, or refused with file and place",
    ),
    "F25": Row(
        "one device computes a wrong bit",
        "exit 16 naming the device, unless the same steps come out right again",
    ),
    "F26": Row("a folder that is read-only, forbidden or gone", "told before anything is compiled; later as F4"),
    "F27": Row("clocks jump or disagree", "nothing is deleted, timed out or taken over for it"),
    "F28": Row(
        "a run that dies again and again before its first save",
        "the supervisor waits longer, gives up, says why",
    ),
    "F29": Row(
        "a secret in the environment, a page of script among the documents",
        "the one is written nowhere; the other is shown as text",
    ),
    "F30": Row("minutes of random faults", "ends with the losses and state of a run without any"),
    "F31": Row(
        "a checkpoint lies under another number: moved, copied, linked",
        "told and set aside; never trained on, sampled, evaluated or exported as that step",
    ),
    "F32": Row(
        "a process that has lost its lock wakes up",
        "it writes nothing: no metrics line, no event, no checkpoint",
    ),
    "F33": Row("a checkpoint's list of files or its commit mark is deleted or changed", "noticed and told"),
    "F34": Row(
        "the work folder is renamed or deleted while the run trains",
        "exit 14 with the true cause; nothing is made at the old path",
    ),
    "F35": Row("the lock is a dangling link, a folder or a FIFO", "one line; no endless loop, no traceback"),
    "F36": Row("the disk has no inodes left", "said as that"),
    "F37": Row("a signal during the last sample or export", "exit 10, or 0 if everything is saved"),
    "F38": Row(
        "shards, manifests, lineage or cached tokens are damaged, swapped or lead outside",
        "found before a token of them is trained on",
    ),
    "F39": Row(
        "a defect of ours, whatever the class of its exception",
        "exit 1 with its traceback; never told as the user's mistake",
    ),
    "F41": Row(
        "a host's local copy is damaged, or the host is replaced",
        "told; the neighbour's copy serves, else the copy before it, else the work folder's checkpoint",
    ),
    "F42": Row(
        "local copies of steps that the run went back from, of another run, of a start that had lost the lock",
        "never taken",
    ),
}
THREATS = {
    "H1": Row(
        "code in a checkpoint, tokenizer or array file",
        "nothing is unpickled, no torch.load, no eval of what a file says",
    ),
    "H2": Row("a config is Python", "only local files run, and never one that lies in a work folder or bucket"),
    "H3": Row(
        "a tokenizer that brings code, or is exchanged",
        "no such option exists; its sha256 is compared when a run goes on",
    ),
    "H4": Row("names that lead out of their folder", "plain names only, in manifests, shard headers and names of runs"),
    "H5": Row(
        "files that unpack to more than memory holds",
        "bounds on files, documents and lines; file and place are named",
    ),
    "H6": Row(
        "secrets in logs, records and reports",
        "no setting may hold one; every place that writes takes them out",
    ),
    "H7": Row(
        "files that others on the machine can read",
        "the run's folder is 0700 and its files 0600 unless --run_dir_mode",
    ),
    "H8": Row(
        "ports that anybody can reach",
        "listening on the interface of the run alone, and no server of any other kind; local copies need a secret",
    ),
    "H9": Row(
        "documents as script in HTML reports",
        "everything escaped at one place; the page may load and run nothing",
    ),
    "H10": Row("objects exchanged in a bucket", "sizes and sha256 in the manifest, compared when they are opened"),
    "H11": Row("access tokens sent to another address", "an endpoint that is not this machine is refused"),
    "H12": Row(
        "dependencies that change",
        "floors and ceilings; versions told at each start, and named where they changed",
    ),
    "H13": Row(
        "text that drives a terminal or breaks a log",
        "control characters taken out of what is printed; records are JSON",
    ),
    "H14": Row(
        "races in /tmp", "nothing is kept there; compiled programs lie in the user's own cache and the work folder"
    ),
    "H15": Row("links inside a folder that came from elsewhere", "no file outside that folder is read"),
    "H16": Row(
        "hostile names and texts in pages, cards, terminals and logs",
        "escaped as the format needs: HTML, Markdown, control and bidirectional characters",
    ),
    "H17": Row(
        "evaluation files that unpack without end, endless templates, nested JSON, absurd counts",
        "bounded in memory and time; one line, exit 2",
    ),
    "H18": Row("idle and endless clients of a local page", "bounded; the page goes on answering"),
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
