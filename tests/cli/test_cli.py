"""One command, a table of verbs, and one clear line for what is not in it."""

import importlib.util
import re
import subprocess
import sys

import pytest

from jaxscale import cli
from jaxscale.cli import verify
from jaxscale.config import RunConfig
from jaxscale.settings import help_text
from jaxscale.system.exits import CODES_LINE, BadInput, Exit


def jaxscale(*arguments, module=None):
    start = ["-m", module] if module else ["-c", "from jaxscale.cli import main; main()"]
    return subprocess.run([sys.executable, *start, *arguments], capture_output=True, text=True, timeout=120)


def test_help_lists_every_verb_with_a_line():
    done = jaxscale("--help")
    assert done.returncode == 0 and done.stderr == "" and CODES_LINE not in done.stdout
    assert all(f" {int(code)}  {code.event}" in done.stdout for code in Exit)
    for verb, summary in cli.VERBS.items():
        assert any(line.split() == [verb, *summary.split()] for line in done.stdout.splitlines())


def test_help_does_not_wait_for_jax():
    code = "import sys, jaxscale.cli as c; c.dispatch(['--help']); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.soak  # Python compiles jax once more for -OO, 20 s
def test_pages_are_the_same_where_python_drops_docstrings():
    imports = "from jaxscale import cli, config; from jaxscale.settings import help_text"
    code = f"{imports}\nprint(*(cli.command_of(verb).page for verb in cli.VERBS), sep='')\n"
    code += "print(help_text.list_groups(config.RunConfig))"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and done.returncode == 0
    pages = "".join(cli.command_of(verb).page for verb in cli.VERBS)
    assert done.stdout == f"{pages}\n{help_text.list_groups(RunConfig)}\n"


@pytest.mark.parametrize(
    ("verb", "told"),
    [
        ("verfy", "did you mean 'verify'?"),
        ("xyz", f"verbs: {', '.join(cli.VERBS)}"),
    ],
)
def test_an_unknown_verb_is_one_line_with_the_nearest_name(verb, told):
    done = jaxscale(verb)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert verb in line and told in line


def test_every_verb_is_there():
    for verb, summary in cli.VERBS.items():
        assert importlib.util.find_spec(cli.module_of(verb)) is not None and summary


@pytest.mark.slow
def test_both_doors_lead_to_the_same_verb():
    one, other = jaxscale("watch", "--help"), jaxscale("watch", "--help", module="jaxscale.cli")
    assert one.returncode == other.returncode == 0
    assert "--workdir=" in one.stdout and one.stdout == other.stdout
    assert one.stdout.endswith(f"\n{CODES_LINE}\n")


def test_a_module_of_a_verb_is_not_a_program_and_names_the_command():
    done = jaxscale("--help", module="jaxscale.cli.watch")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "jaxscale.cli.watch is not a program; run: python -m jaxscale.cli VERB\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["rezume", "--config=x.py"], "verbs: resume, parity"),
        (["resume", "--config=missing.py"], "--config=missing.py is not a file"),
        (["resume", "--config=missing.py", "--steps=3"], "--steps=3 must be a whole number, 12 or more"),
        (["parity", "--steps=12"], "--steps=12 is not a flag of this command"),
        (["resume", "--config=missing.py", "--small=yes"], "--small=yes must be on, off or auto"),
    ],
)
def test_a_wrong_command_line_of_verify_is_one_clear_line(arguments, told):
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        verify.main(arguments)
    assert isinstance(error.value, BadInput) and "\n" not in str(error.value)


DIGITS = "9" * 5000  # more than Python reads as a number


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("sample workdir=runs/x", "; write --workdir=runs/x"),
        ("ckpt list workdir=runs/x", "; write --workdir=runs/x"),
        ("ckpt list --workdir=x --keep-last=1", "; other verbs of this command accept this flag"),
        ("sample --workdir=x --config.seed=1", "; the settings are read from the work folder"),
        ("trace --workdir=x --step=3 --config=x.py", "; the settings are read from the work folder"),
        ("completion bash --config=x.py", "--config=x.py is not a flag"),
        ("completion bash zsh", "zsh is not a flag"),
        ("plan --loss=true --runs=x", "--config must be given"),
        ("plan --loss --runs=x --json=/nowhere/x.json", "--json=/nowhere/x.json must be a file in an existing folder"),
        ("bench data --config=x.py", "set a recipe: --recipe=FILE"),
        ("bench data --config.stages=x", "also set --recipe=FILE or --input=GLOB"),
        ("prepare --config=RECIPE --input=*.txt --output=w", "sources.web must be a group of settings"),
        (f"train --stop_after={DIGITS}", "must be a whole number, 1 or more"),
        (f"train --config=configs/quickstart.py --skip-data={DIGITS}:1", "must be ranges FROM:TO of batches"),
    ],
    ids=lambda text: text[:40],
)
def test_what_does_not_belong_there_is_told_with_what_does(tmp_path, line, told):
    (tmp_path / "recipe.py").write_text("def get_config():\n    return {'sources': {'web': 'x'}}\n")
    with pytest.raises(BadInput) as error:
        cli.dispatch(line.replace("RECIPE", str(tmp_path / "recipe.py")).split())
    assert told in str(error.value)
