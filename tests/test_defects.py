"""A defect of ours ends with its traceback and exit code 1, whatever its class and wherever it is; never as a mistake
of the person at the keyboard."""

import ast
import io
import pathlib
import random
import re
import sys
import tokenize
import types

import numpy as np
import pytest
import tiny

from jaxscale import config, main, units
from jaxscale.core.models import sharded
from jaxscale.runtime.data import best_fit
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer
from jaxscale.system.exits import BadInput, Exit, run_and_exit, verdict


def broadcast(*args, **kwargs):
    return np.zeros(3) + np.zeros(4)


def unpack(*args, **kwargs):
    one, two = (1, 2, 3)
    return one, two


def look_up(*args, **kwargs):
    return [].index(1)


def zip_strictly(*args, **kwargs):
    return list(zip([1], [], strict=True))


def read_number(*args, **kwargs):
    return int("many")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("defects")
    (folder / "text.txt").write_text(" ".join(random.Random(0).choices("def return import".split(), k=400)))
    model = tiny.LLAMA | dict(vocab_size=272, num_layers=1)
    values = tiny.VALUES | dict(model=model, train_tokens="2 steps", data=dict(files=str(folder / "text.txt")))
    values |= dict(monitor=dict(tensorboard=False), optim=dict(warmup_tokens="1 steps"))
    (folder / "tiny.py").write_text(f"def get_config():\n    return {values!r}\n")
    return folder / "tiny.py"


@pytest.mark.cases(1)
@pytest.mark.fault("F39")
@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        pytest.param(config, "CHECKS", zip_strictly, id="the rules between settings"),
        pytest.param(units, "resolve", read_number, id="the budget"),
        pytest.param(sharded, "make_model", unpack, id="the model, which preflight looks at first"),
        pytest.param(ByteTokenizer, "encode_block", look_up, id="the tokenizer"),
        pytest.param(best_fit, "pack_window", broadcast, id="packing"),
        pytest.param(best_fit.BestFitRows, "pieces", broadcast, id="a batch, read by the feed's thread"),
    ],
)
def test_a_defect_of_ours_keeps_its_traceback_and_leaves_with_1(
    owner, name, defect, config_file, tmp_path, monkeypatch
):
    ours = types.FunctionType(defect.__code__, {"__name__": "jaxscale.packing", "np": np})  # a function of the package
    monkeypatch.setattr(owner, name, (ours,) if name == "CHECKS" else ours)
    monkeypatch.setattr(sys, "argv", ["jaxscale", f"--config={config_file}", f"--workdir={tmp_path / 'run'}"])
    with pytest.raises(ValueError) as error:  # not SystemExit: Python shows the traceback and leaves with 1
        run_and_exit(main.main)
    assert error.type is not BadInput and verdict(error.value) == (Exit.ERROR, None)
    assert error.traceback[-1].name == defect.__name__


PACKAGE = pathlib.Path(config.__file__).parent
SPACE = (tokenize.NL, tokenize.COMMENT)
CANDIDATE = re.compile(r"""[(\[{,:=n]\s*\(\s*[rbf]?(?:"[^"\n]*"|'[^'\n]*')\s*\)\s*[,)\]}:]""")


def strings_that_look_like_tuples(source):
    """Lines on which one string stands alone in parentheses as an item: `f(a, ("b"))`, where ("b",) was meant.

    A string of several parts that is the whole right side of an assignment, or returned, is wrapped text.
    """
    if not CANDIDATE.search(source):  # the tokenizer takes 10 s for the whole package
        return []
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in SPACE]
    return [
        opening.start[0]
        for before, opening, text, closing, after in zip(tokens, tokens[1:], tokens[2:], tokens[3:], tokens[4:])
        if (opening.string, text.type, closing.string) == ("(", tokenize.STRING, ")")
        and before.string in ("(", "[", "{", ",", ":", "in", "=") and after.string in (",", ")", "]", "}", ":")
    ]  # fmt: skip


def test_no_string_in_parentheses_stands_where_a_tuple_of_strings_belongs():
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        for line in strings_that_look_like_tuples(path.read_text(encoding="utf-8"))
    }
    assert not found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('f(1, ("a"))', [1]),
        ("x = [\n    ('a'),\n]", [2]),
        ("if x in ('a'):\n    pass", [1]),
        ('f(("a",), g("b"), ("c" "d"))', []),
        ('x = (\n    "wrapped text"\n)', []),
    ],
)
def test_a_string_in_parentheses_is_seen_where_a_tuple_could_be_meant(source, lines):
    assert strings_that_look_like_tuples(source) == lines


PURE = set(
    "abs all any fullmatch get isinstance kind_of len map max min prod range set sorted sum tell tuple values".split()
)


def calls_inside_asserts(source):
    """(line, call) of each call in an assert that may do more than look: -O leaves out the whole statement."""
    asserts = [node.test for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    calls = [node for test in asserts for node in ast.walk(test) if isinstance(node, ast.Call)]
    named = [(call.lineno, ast.unparse(call.func)) for call in calls]
    return [(line, name) for line, name in named if name.rpartition(".")[2] not in PURE]


@pytest.mark.slow
def test_no_assert_does_work_that_optimized_python_would_leave_out():
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path in PACKAGE.rglob("*.py")
        for line, name in calls_inside_asserts(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_work_inside_an_assert_is_seen():
    assert calls_inside_asserts("assert file.readinto(x) == 3\nassert len(x) == 3") == [(1, "file.readinto")]
