"""A room imports only rooms below it, and nothing in the package runs code that came out of a file."""

import ast
import functools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
ROOMS = {
    "system": 0, "units": 1, "hardware": 1, "conditions": 1.1, "schema": 1.2, "command_line": 1.25, "unread": 1.3,
    "help_text": 1.3, "text": 2, "hosts": 2, "sharding": 2, "optim": 2, "monitor": 2, "ops": 2.5, "data": 3,
    "reporting": 3, "corpus": 3.5, "models": 4, "checkpoint": 5, "sampling": 5, "interop": 6, "eval": 6, "training": 7,
    "config": 8, "build": 9, "inference": 9, "planning": 9.5, "ahead": 10, "run": 11, "api": 12, "cli": 13, "main": 14,
}  # fmt: skip
# May be imported inside a function: each is slow to load or not always installed.
HEAVY = {
    "apache_beam", "array_record", "datasets", "etils", "fsspec", "ftfy", "gcsfs", "gigatoken", "google", "grain",
    "huggingface_hub", "jinja2", "libtpu", "lm_eval", "matplotlib", "orbax", "orjson", "profanity_check", "py3langid",
    "pyarrow", "pydivsufsort", "qwix", "rensa", "resiliparse", "rustbpe", "sentencepiece", "seqio", "tensorboardX",
    "tensorflow", "tensorstore", "tiktoken", "tokenizers", "torch", "trackio", "trafilatura", "transformers", "wandb",
}  # fmt: skip
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUNNERS = {"eval", "exec", "compile"}  # the builtins; jax.eval_shape or re.compile are attributes and no concern
LOADERS = {("torch", "load"), ("jax", "pickle"), ("pandas", "read_pickle"), ("yaml", "load"), ("yaml", "unsafe_load")}


def modules():
    return sorted((ROOT / "jaxscale").rglob("*.py"))


parsed = functools.cache(ast.parse)


def imports(tree, file):
    """Yields (dotted module, line, inside a function?) for each import; 'from x import y' yields x.y."""
    package = pathlib.Path(file).with_suffix("").parts[:-1]  # a relative import of level 1 starts here
    waiting = [(tree, False)]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, inside
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = [*package[: len(package) - node.level + 1], *base]
            for alias in node.names:
                yield ".".join([*base, alias.name]), node.lineno, inside
        elif not isinstance(node, ast.expr):  # none of which holds an import
            inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            waiting += [(child, inside) for child in ast.iter_child_nodes(node)]


def room_of(module):
    """'jaxscale.optim.schedules' -> 'optim'; None for what is not ours, and for the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "jaxscale" and len(parts) > 1 and not parts[1].startswith("__") else None


def wraps_heavy(module):
    """True if our module `module` (or the module that the name `module` is in) imports a heavy package at its top."""
    for dotted in (module, module.rpartition(".")[0]):
        path = ROOT / (dotted.replace(".", "/") + ".py")
        if path.exists():
            tops = imports(parsed(path.read_text(encoding="utf-8")), relative(path))
            return any(name.split(".")[0] in HEAVY and not inside for name, _, inside in tops)
    return False


def wrong_imports(source, file):
    """One line for each import in `source` (at `file`, relative to the repository) that breaks a rule.

    Inside a function: a heavy package, a file of the same room around one, or a lower room (which can hide no cycle).
    """
    own = room_of(file.removesuffix(".py").replace("/", "."))
    if own is not None and own not in ROOMS:
        return [f"{file}:1: room {own!r} has no number in ROOMS; give it one"]
    found = []
    for module, line, inside in imports(parsed(source), file):
        room = room_of(module)
        if room not in (None, own):
            if room not in ROOMS:
                found.append(f"{file}:{line}: imports {module}, and room {room!r} has no number in ROOMS")
            elif own is None:
                found.append(f"{file}:{line}: the package itself imports room {room!r}; it imports none")
            elif ROOMS[room] >= ROOMS[own]:
                found.append(
                    f"{file}:{line}: room {own!r} ({ROOMS[own]}) imports {module} of room {room!r} ({ROOMS[room]}); "
                    "only rooms with a smaller number may be imported"
                )
        if own in ("data", "text", "corpus") and module.split(".")[0] in ("jax", "jaxlib", "flax"):
            found.append(f"{file}:{line}: {own} is numpy only, so that it runs where jax is not: imports {module}")
        elif inside and module.split(".")[0] not in HEAVY and (room is None or room == own and not wraps_heavy(module)):
            found.append(f"{file}:{line}: imports {module} inside a function; that is for heavy optional packages")
    return found


def unsafe_loads(source, file):
    """One line for each way in `source` to run code that a file brings."""
    tree, found = parsed(source), []
    for module, line, _ in imports(tree, file):
        parts = tuple(module.split("."))
        if parts[0] in UNPICKLERS or parts[:2] in LOADERS:
            found.append(f"{file}:{line}: imports {module}, which can run code out of a file")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNNERS:
            found.append(f"{file}:{node.lineno}: calls {node.func.id}()")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in LOADERS:
                found.append(f"{file}:{node.lineno}: uses {node.value.id}.{node.attr}")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.append(f"{file}:{node.value.lineno}: allow_pickle must be False or absent")
    return found


def swallowed_defects(source, file):
    """One line for each `except ValueError` around a call of our own code: it would rephrase our defects too."""
    tree, found = parsed(source), []
    ours = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    ours |= {name.rpartition(".")[2] for name, *_ in imports(tree, file) if room_of(name) is not None}
    for block in ast.walk(tree):
        if not isinstance(block, ast.Try):
            continue
        raised = {id(node.exc) for node in ast.walk(block) if isinstance(node, ast.Raise)}
        calls = {
            ast.unparse(node.func)
            for statement in block.body
            for node in ast.walk(statement)
            if isinstance(node, ast.Call) and id(node) not in raised
        }
        called = sorted(call for call in calls if call.partition(".")[0].partition("(")[0] in ours)
        for handler in block.handlers:
            names = {node.id for node in ast.walk(handler.type or ast.Pass()) if isinstance(node, ast.Name)}
            if called and "ValueError" in names:
                found.append(
                    f"{file}:{handler.lineno}: catches ValueError around {called}; BadInput is what they raise"
                )
    return found


def relative(path):
    return path.relative_to(ROOT).as_posix()


def test_rooms_import_only_rooms_below_them():
    found = [line for path in modules() for line in wrong_imports(path.read_text(encoding="utf-8"), relative(path))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.fault("H1")
def test_nothing_runs_code_out_of_a_file():
    found = [line for path in modules() for line in unsafe_loads(path.read_text(encoding="utf-8"), relative(path))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.fault("F39")
def test_nothing_takes_a_defect_of_ours_for_a_mistake_of_the_user():
    found = [line for path in modules() for line in swallowed_defects(path.read_text(encoding="utf-8"), relative(path))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("clause, seen", [("ValueError", 1), ("(OSError, ValueError)", 1), ("BadInput", 0)])
def test_a_clause_that_would_take_our_defects_is_seen(clause, seen):
    source = f"from jaxscale.data import pack\n\ntry:\n    x = pack(1)\nexcept {clause}:\n    raise"
    assert len(swallowed_defects(source, "jaxscale/training/feed.py")) == seen
    assert not swallowed_defects(source.replace("pack(1)", "int('1')"), "jaxscale/training/feed.py")


def test_configs_do_not_import_the_package():
    for path in sorted((ROOT / "configs").rglob("*.py")):
        names = [module for module, *_ in imports(parsed(path.read_text(encoding="utf-8")), relative(path))]
        assert not [name for name in names if name.split(".")[0] == "jaxscale"], f"{relative(path)} imports jaxscale"


@pytest.mark.parametrize(
    ("file", "source", "told"),
    [
        (
            "jaxscale/ops/rope.py",
            "import jax\n\nfrom jaxscale.models import llama",
            "rope.py:3: room 'ops' (2.5) imports",
        ),
        (
            "jaxscale/optim/adam.py",
            "from jaxscale import data",
            "room 'optim' (2) imports jaxscale.data of room 'data' (3)",
        ),
        ("jaxscale/optim/adam.py", "import jaxscale.data.batch as b", "room 'optim' (2) imports jaxscale.data.batch"),
        ("jaxscale/optim/adam.py", "from ..training import step", "room 'optim' (2) imports jaxscale.training.step"),
        ("jaxscale/schema.py", "from .unread import x", "imports jaxscale.unread.x of room 'unread' (1.3)"),
        ("jaxscale/schema.py", "def f():\n    from jaxscale.cli import plan", "schema.py:2: room 'schema' (1.2)"),
        ("jaxscale/training/loop.py", "def f():\n    import numpy", "imports numpy inside a function"),
        ("jaxscale/training/loop.py", "def f():\n    from jaxscale.training import step", "inside a function"),
        ("jaxscale/training/loop.py", "from jaxscale.utils import x", "room 'utils' has no number"),
        ("jaxscale/misc.py", "", "room 'misc' has no number"),
        ("jaxscale/data/packing.py", "import jax.numpy as jnp", "data is numpy only"),
        ("jaxscale/__init__.py", "from jaxscale import schema", "the package itself imports room 'schema'"),
    ],
)
def test_an_import_that_looks_up_or_sideways_is_named(file, source, told):
    (line,) = wrong_imports(source, file)
    assert told in line


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "jaxscale/training/loop.py",
            "from jaxscale import units\nfrom jaxscale.training.state import TrainState\nimport jax",
        ),
        ("jaxscale/checkpoint/manager.py", "def f():\n    import orbax.checkpoint as ocp"),
        ("jaxscale/optim/adam.py", "from .schedules import Schedule\nfrom ..schema import setting"),
        ("jaxscale/cli/plan.py", "import jaxscale\nfrom jaxscale import __version__"),
    ],
)
def test_an_import_that_looks_down_or_stays_at_home_is_fine(file, source):
    assert wrong_imports(source, file) == []


@pytest.mark.fault("H1")
@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "def f():\n    import dill",
        "eval('1')",
        "exec(open('x').read())",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "torch.load(path)",
        "from torch import load",
    ],
)
def test_a_way_to_run_code_out_of_a_file_is_seen(source):
    assert len(unsafe_loads(source, "jaxscale/data/x.py")) == 1


@pytest.mark.parametrize(
    "source", ["model.eval()", "jax.eval_shape(f)", "re.compile('a')", "np.load(p, allow_pickle=False)"]
)
def test_harmless_names_are_let_through(source):
    assert unsafe_loads(source, "jaxscale/data/x.py") == []
