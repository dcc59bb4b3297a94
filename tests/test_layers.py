"""A room imports only rooms below it, and nothing in the package runs code that came out of a file."""

import ast
import functools
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Packages by prefix, the lowest first: each imports those of earlier lines, and none of its own line.
ORDER = """
system
units kernels.hardware
settings.conditions settings.renamed
schema
settings.command_line kernels.config
settings.unread settings.help_text core.config core.shardings kernels.collectives kernels.compiler_options
kernels.host_memory
core.axes
kernels
core
runtime.text runtime.hosts runtime.monitor
runtime.data
runtime.checkpoint runtime.sampling
runtime.eval
runtime.training
config
program.auto_dtype program.budget settings.config_file program.fault_injection
program.device_checks
build
program.fitting_mesh program.residuals
program.memory
program.machine_check program.out_of_memory
runtime.run
tools.reporting tools.corpus tools.interop
tools.planning
tools.preflight
tools.qualify
tools.lab
api
cli
main
"""
ROOMS = {room: rank for rank, line in enumerate(ORDER.strip().split("\n")) for room in line.split()}
GROUPS = {"runtime", "tools", "settings", "program"}  # hold packages, and no code of their own
# What core may import of ours; of others only these. kernels/ import only the axes of core, for types.
CORE_IMPORTS = ("core", "kernels", "schema", "units", "system.exits")
CORE_LIBRARIES = {"jax", "flax", "optax", "numpy"}
# The parts of a package, the lowest first; what is not named stands above them. A folder imports lower ones only.
PARTS = {
    "runtime.text": {"config": 0, "document": 0, "sources": 1, "tokenizer": 1, "chat": 2},
    "runtime.data": {"config": 0, "objective_config": 0, "stacking": 0, "objectives": 1},
    "runtime.monitor": {"config": 0, "health": 1},
    "kernels": {"config": 0, "gradient": 0, "attention": 1, "matmul": 1},
    "tools.corpus": {"curate": 0, "prepare": 1},
    "tools.interop": {"families": 0},
}
SETTINGS = re.compile(r"jaxscale/(\w+/)*(\w+_)?config\.py")  # files that hold settings, and load no machinery
LIGHT = {  # what they may import besides each other
    "schema", "units", "settings.conditions", "settings.renamed", "settings.unread", "settings.command_line", "system",
}  # fmt: skip
# Its settings are checked by the very rules that they set: what it puts for personal data must not look like some.
BESIDE_MACHINERY = {"jaxscale/tools/corpus/curate/pii.py"}
# Of our files, with those that they import in turn.
MOST_LOADED = {"jaxscale.config": 39, "jaxscale.build": 80, "jaxscale.core.step": 50, "jaxscale.api.training": 256}
# Of our files, imported by a function of the same package, since few runs need them.
OPTIONAL = {
    "core.optim.adafactor_lamb", "core.optim.muon", "core.pipeline_step", "system.redact",
}  # fmt: skip
# May be imported inside a function: each is slow to load or not always installed.
HEAVY = {
    "apache_beam", "array_record", "datasets", "etils", "fasttext", "fsspec", "ftfy", "gcsfs", "gigatoken", "google",
    "grain",
    "huggingface_hub", "jinja2", "libtpu", "lm_eval", "matplotlib", "orbax", "orjson", "profanity_check", "py3langid",
    "pyarrow", "pydivsufsort", "qwix", "rensa", "resiliparse", "rustbpe", "sentencepiece", "seqio", "tensorboardX",
    "tensorflow", "tensorstore", "tiktoken", "tokenizers", "torch", "trackio", "trafilatura", "transformers", "wandb",
}  # fmt: skip
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUNNERS = {"eval", "exec", "compile"}  # the builtins; jax.eval_shape or re.compile are attributes and no concern
LOADERS = {("torch", "load"), ("jax", "pickle"), ("pandas", "read_pickle"), ("yaml", "load"), ("yaml", "unsafe_load")}


def modules():
    return sorted((ROOT / "jaxscale").rglob("*.py"))


def modules_of(top):
    return sorted((ROOT / "jaxscale" / top).rglob("*.py"))


def dotted(path):
    """jaxscale/core/batch.py -> 'jaxscale.core.batch'; a package for its __init__.py."""
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


parsed = functools.cache(ast.parse)
nodes = functools.cache(lambda tree: tuple(ast.walk(tree)))
BY_NAME = {"import_module", "resolve_name"}
# These import by name what somebody asks for: a verb, or a function of the Python interface. All else lies below them.
DOORS = {"jaxscale/__init__.py", "jaxscale/cli/__init__.py"}
NAMED_MODULE = re.compile(r"(jaxscale(?:\.[a-z_0-9]+)+)(?::\w+)?")


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


def named_modules(tree):
    """Yields (dotted module, line) for text that names a module, where modules are imported by name."""
    if not any(isinstance(node, ast.Attribute) and node.attr in BY_NAME for node in nodes(tree)):
        return
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if (found := NAMED_MODULE.fullmatch(node.value)) and file_of(found[1]):
                yield found[1], node.lineno


def file_of(module):
    """The file of our module, or None for a name that is none."""
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def direct_imports(module):
    """Our modules that the module imports at its top, packages on the way included."""
    tree = parsed(file_of(module).read_text(encoding="utf-8"))
    names = [name for name, _, inside in imports(tree, relative(file_of(module))) if not inside]
    names += [name for name, _ in named_modules(tree) if SETTINGS.fullmatch(relative(file_of(name)))]
    starts = [name.split(".")[:length] for name in names for length in range(1, name.count(".") + 2)]
    return {".".join(start) for start in starts if start[0] == "jaxscale" and file_of(".".join(start))}


def loaded_by(module):
    """Our modules that are loaded with this one, itself included."""
    found, waiting = set(), [module]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += direct_imports(name)
    return found


def looks_up_in_room(own, module):
    """Whether a file imports a part of its own room that stands above its own, or next to it."""
    room = room_of(own)
    if room not in PARTS or room_of(module) != room:
        return False
    mine, theirs = (name.removeprefix(f"jaxscale.{room}").lstrip(".").partition(".")[0] for name in (own, module))
    if mine == theirs or not theirs:
        return False
    below, above = (PARTS[room].get(part, 9) for part in (theirs, mine))
    return below > above or below == above and bool({mine, theirs} & folders_of(room))


@functools.cache
def folders_of(room):
    """Names of the folders in a room."""
    return {path.name for path in (ROOT / "jaxscale" / room.replace(".", "/")).iterdir() if path.is_dir()}


@functools.cache
def room_of(module):
    """'jaxscale.core.optim.muon' -> 'core', by the longest prefix in ROOMS; None for the package itself, a group of
    packages, and what is not ours."""
    parts = [part for part in module.split(".") if not part.startswith("__")]
    if parts[0] != "jaxscale" or parts[1:] == [] or (len(parts) == 2 and parts[1] in GROUPS):
        return None
    prefixes = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
    return next((prefix for prefix in prefixes if prefix in ROOMS), ".".join(parts[1 : 2 + (parts[1] in GROUPS)]))


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

    Inside a function: a heavy package, a file of the same room around one, a lower room (which can hide no cycle), or
    an OPTIONAL file that does not import this one.
    """
    own = room_of(file.removesuffix(".py").replace("/", "."))
    if own is not None and own not in ROOMS:
        return [f"{file}:1: room {own!r} has no number in ROOMS; give it one"]
    found, tree = [], parsed(source)
    named = [] if file in DOORS else [(*one, False) for one in named_modules(tree)]
    for module, line, inside in [*imports(tree, file), *named]:
        room = room_of(module)
        if own is not None and looks_up_in_room(file.removesuffix(".py").replace("/", "."), module):
            found.append(f"{file}:{line}: imports {module}, a part of its room that is not below it (PARTS)")
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
        if own in ("runtime.data", "runtime.text", "tools.corpus") and module.split(".")[0] in (
            "jax",
            "jaxlib",
            "flax",
        ):
            found.append(f"{file}:{line}: {own} is numpy only, so that it runs where jax is not: imports {module}")
        elif (
            inside
            and module.split(".")[0] not in HEAVY
            and (room is None or room == own and not wraps_heavy(module) and not is_optional(module, file))
        ):
            found.append(f"{file}:{line}: imports {module} inside a function; that is for heavy optional packages")
    return found


def is_optional(module, file):
    """True for a name in a file of OPTIONAL whose imports do not lead back to `file`."""
    owner = module.rpartition(".")[0]
    return owner.removeprefix("jaxscale.") in OPTIONAL and dotted(ROOT / file) not in loaded_by(owner)


def strange_to_core(source, file):
    """One line for each import of a file of core/ that is neither of ours nor a library that core may use."""
    found = []
    for module, line, _ in imports(parsed(source), file):
        top, _, rest = module.partition(".")
        allowed = top in CORE_LIBRARIES | sys.stdlib_module_names
        if top == "jaxscale":
            allowed = rest == "units" or rest.startswith(tuple(f"{one}." for one in CORE_IMPORTS))
        if not allowed and rest not in CORE_IMPORTS:
            found.append(f"{file}:{line}: core imports {module}")
    return found


def unsafe_loads(source, file):
    """One line for each way in `source` to run code that a file brings."""
    tree, found = parsed(source), []
    for module, line, _ in imports(tree, file):
        parts = tuple(module.split("."))
        if parts[0] in UNPICKLERS or parts[:2] in LOADERS:
            found.append(f"{file}:{line}: imports {module}, which can run code out of a file")
    for node in nodes(tree):
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
    for block in nodes(tree):
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


def test_core_imports_little():
    files = [(path.read_text(encoding="utf-8"), relative(path)) for path in modules_of("core")]
    found = [line for source, file in files for line in strange_to_core(source, file)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("source", ["import orbax", "from jaxscale.system import paths", "import jaxscale.config"])
def test_what_core_must_not_import_is_seen(source):
    assert len(strange_to_core(source, "jaxscale/core/step.py")) == 1


def heavy_settings(source, file):
    """One line for each setting that stands beside machinery, and for each import of settings that would load some."""
    tree = parsed(source)
    calls = [node.func for node in nodes(tree) if isinstance(node, ast.Call)]
    has_settings = any(isinstance(call, ast.Name) and call.id == "setting" for call in calls)
    if not SETTINGS.fullmatch(file):
        allowed = file in (*BESIDE_MACHINERY, "jaxscale/schema.py")
        return [f"{file}: has settings; they belong into its room's config.py"] if has_settings and not allowed else []
    found = []
    for module, line, _ in imports(tree, file):
        owner = next((name for name in (module, module.rpartition(".")[0]) if file_of(name)), "")
        if module.split(".")[0] in ("jax", "flax", "optax"):
            found.append(f"{file}:{line}: imports {module}, which settings need not")
        elif room_of(module) not in (None, *LIGHT) and file != "jaxscale/config.py":
            target = relative(file_of(owner))
            if not SETTINGS.fullmatch(target) and target not in BESIDE_MACHINERY:
                found.append(f"{file}:{line}: imports {module}; settings import other settings only")
    return found


def test_settings_stand_in_files_that_load_no_machinery():
    found = [line for path in modules() for line in heavy_settings(path.read_text(encoding="utf-8"), relative(path))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("module, most", MOST_LOADED.items())
def test_what_a_module_loads_stays_little(module, most):
    names = "[n for n, m in sys.modules.items() if n.startswith('jaxscale') and getattr(m, '__file__', None)]"
    program = [sys.executable, "-c", f"import sys, {module}; print(*{names})"]
    loaded = subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert len(loaded) <= most, f"{module} loads {len(loaded)} of our files: {sorted(loaded)}"


def test_training_loads_no_tools():
    assert not [name for name in loaded_by("jaxscale.api.training") if name.startswith("jaxscale.tools")]


@pytest.mark.parametrize("door", ["jaxscale.config", "jaxscale.cli.supervise"])
def test_neither_a_config_nor_a_supervisor_loads_jax(door):
    names = {name.split(".")[0] for module in loaded_by(door) for name in tops(module)}
    assert not names & {"jax", "jaxlib", "flax", "optax", "orbax", "tensorstore"}


def tops(module):
    """What the module imports at its top."""
    file = file_of(module)
    return [name for name, _, inside in imports(parsed(file.read_text(encoding="utf-8")), relative(file)) if not inside]


@pytest.mark.parametrize(
    "file, source",
    [
        ("jaxscale/core/guard.py", "x: int = setting(1)"),
        ("jaxscale/core/config.py", "import jax"),
        ("jaxscale/runtime/data/objective_config.py", "from jaxscale.core.batch import Batch"),
    ],
)
def test_settings_beside_machinery_are_seen(file, source):
    assert len(heavy_settings(source, file)) == 1


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
    source = f"from jaxscale.runtime.data import pack\n\ntry:\n    x = pack(1)\nexcept {clause}:\n    raise"
    assert len(swallowed_defects(source, "jaxscale/runtime/training/feed.py")) == seen
    assert not swallowed_defects(source.replace("pack(1)", "int('1')"), "jaxscale/runtime/training/feed.py")


def test_configs_do_not_import_the_package():
    for path in sorted((ROOT / "configs").rglob("*.py")):
        names = [module for module, *_ in imports(parsed(path.read_text(encoding="utf-8")), relative(path))]
        assert not [name for name in names if name.split(".")[0] == "jaxscale"], f"{relative(path)} imports jaxscale"


@pytest.mark.parametrize(
    ("file", "source", "told"),
    [
        (
            "jaxscale/kernels/rope.py",
            "import jax\n\nfrom jaxscale.core.models import llama",
            "rope.py:3: room 'kernels' (",
        ),
        (
            "jaxscale/core/optim/adam.py",
            "from jaxscale.runtime import data",
            f"room 'core' ({ROOMS['core']}) imports jaxscale.runtime.data of room 'runtime.data'",
        ),
        ("jaxscale/core/shardings.py", "import jaxscale.core.step as s", "imports jaxscale.core.step of room 'core'"),
        ("jaxscale/kernels/norm.py", "from ..core import step", "imports jaxscale.core.step of room 'core'"),
        ("jaxscale/schema.py", "from .settings.unread import x", "settings.unread.x of room 'settings.unread'"),
        ("jaxscale/schema.py", "def f():\n    from jaxscale.cli import plan", "schema.py:2: room 'schema' ("),
        ("jaxscale/runtime/training/loop.py", "def f():\n    import numpy", "imports numpy inside a function"),
        ("jaxscale/core/step.py", "def f():\n    from jaxscale.core import state", "inside a function"),
        ("jaxscale/cli/plan.py", "from jaxscale.tools.utils import x", "room 'tools.utils' has no number"),
        ("jaxscale/misc.py", "", "room 'misc' has no number"),
        ("jaxscale/runtime/data/packing.py", "import jax.numpy as jnp", "data is numpy only"),
        ("jaxscale/__init__.py", "from jaxscale import schema", "the package itself imports room 'schema'"),
        (
            "jaxscale/core/optim/adam.py",
            "importlib.import_module('jaxscale.runtime.data.order')",
            "imports jaxscale.runtime.data.order of room",
        ),
        ("jaxscale/runtime/data/config.py", "import jaxscale.runtime.data.objectives", "that is not below it"),
        (
            "jaxscale/runtime/text/sources/x.py",
            "from jaxscale.runtime.text.tokenizer import base",
            "that is not below it",
        ),
    ],
)
def test_an_import_that_looks_up_or_sideways_is_named(file, source, told):
    (line,) = wrong_imports(source, file)
    assert told in line


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "jaxscale/runtime/training/loop.py",
            "from jaxscale import units\nfrom jaxscale.core.state import TrainState\nimport jax",
        ),
        ("jaxscale/runtime/checkpoint/manager.py", "def f():\n    import orbax.checkpoint as ocp"),
        ("jaxscale/core/optim/adam.py", "from .schedules import Schedule\nfrom ...schema import setting"),
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
    assert len(unsafe_loads(source, "jaxscale/runtime/data/x.py")) == 1


@pytest.mark.parametrize(
    "source", ["model.eval()", "jax.eval_shape(f)", "re.compile('a')", "np.load(p, allow_pickle=False)"]
)
def test_harmless_names_are_let_through(source):
    assert unsafe_loads(source, "jaxscale/runtime/data/x.py") == []
