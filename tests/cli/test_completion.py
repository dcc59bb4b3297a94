"""What `jaxscale completion` prints completes the command in a real shell, as the Tab key would."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest

from jaxscale import cli, schema
from jaxscale.cli import completion
from jaxscale.config import RunConfig

ASK = """
source "$1"
COMP_LINE="$2" COMP_POINT=${#2} COMP_TYPE=9
read -ra COMP_WORDS <<<"$(sed 's/[=:]/ & /g' <<<"$2")"
[[ "$2" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_jaxscale jaxscale "" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """{shell: file}, of the verbs as they are."""
    folder, verbs = tmp_path_factory.mktemp("completion"), completion.read_verbs()
    files = {}
    for shell in ("bash", "zsh"):
        files[shell] = folder / f"jaxscale.{shell}"
        files[shell].write_text(completion.script(shell, verbs))
    return files


@pytest.fixture(scope="module")
def tab(scripts, tmp_path_factory):
    """line -> what bash offers behind it, in a folder with two configs."""
    home = tmp_path_factory.mktemp("home")
    (home / "configs" / "data").mkdir(parents=True)
    for name in ("configs/auto.py", "configs/auto.txt", "configs/data/web.py", "notes.md"):
        (home / name).write_text("")

    def ask(line):
        command = ["bash", "--norc", "-c", ASK, "bash", str(scripts["bash"]), line]
        done = subprocess.run(command, capture_output=True, text=True, cwd=home, timeout=60)
        assert done.stderr == "" and done.returncode == 0, done.stderr
        return [word for word in done.stdout.split("\n") if word]

    return ask


def test_verbs(tab):
    assert set(tab("jaxscale ")) == {*cli.VERBS, "--help"}
    assert tab("jaxscale re") == ["rehearse", "report"]


def test_flags_of_the_verb_and_its_own_verbs(tab):
    of_report = {"--workdir=", "--card", "--serve", "--serve=", "--price=", "--output=", "--help"}
    assert set(tab("jaxscale report --")) == of_report
    assert "--steal_lock" in tab("jaxscale train --st") and "--config." in tab("jaxscale train --conf")
    assert "--keep_best=" in tab("jaxscale ckpt prune --keep_") and "verify" in tab("jaxscale ckpt v")
    assert set(tab("jaxscale completion ")) >= {"bash", "zsh"}
    assert "--config." not in tab("jaxscale report --conf") and "--config=" not in tab("jaxscale trace --conf")


def test_files_behind_the_equals_sign(tab):
    assert tab("jaxscale train --config=conf") == ["configs/"]
    assert tab("jaxscale train --config=configs/") == ["configs/data/", "configs/auto.py"]
    assert tab("jaxscale sample --prompts=no") == ["notes.md"]


def test_names_of_settings_up_to_the_next_dot(tab):
    assert "--config.optim." in tab("jaxscale train --config.") and "--config.seed=" in tab("jaxscale train --config.")
    assert tab("jaxscale train --config.optim.peak") == ["--config.optim.peak_lr="]
    assert tab("jaxscale plan --config.train.gua") == ["--config.train.guard."]
    assert "--config.near_dedup." in tab("jaxscale prepare --config.near")
    assert tab("jaxscale train --config.seed=1") == []
    found = completion.setting_flags(RunConfig)
    assert {f"--config.{name}=" for name, *_ in schema.describe(RunConfig) if ".NAME" not in name} <= set(found)
    assert "--config.evals." in found and not [flag for flag in found if "NAME" in flag]


def test_no_shell_finds_a_fault_in_it(scripts):
    subprocess.run(["bash", "-n", scripts["bash"]], check=True)
    if tool := shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ.get('PATH', '')}"):
        words = "SC2207,SC2046"  # lists are split into words on purpose
        subprocess.run([tool, "-s", "bash", "-e", words, scripts["bash"]], check=True)
    if zsh := shutil.which("zsh"):
        subprocess.run([zsh, "-n", scripts["zsh"]], check=True)


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_offers_the_same(scripts):
    """A zsh whose builtins only print: what would be offered."""
    code = """
    compadd() { while [[ $1 != -- ]]; do shift; done; shift; print -l -- "$@" }
    compdef() { }
    source $1
    words=(${(z)2} "") CURRENT=$#words PREFIX=""
    [[ $2 != *" " ]] && words=(${(z)2}) CURRENT=$#words PREFIX=$words[-1]
    _jaxscale
    """
    ask = lambda line: subprocess.run(
        ["zsh", "-f", "-c", code, "zsh", scripts["zsh"], line], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(ask("jaxscale ")) == {*cli.VERBS, "--help"}
    assert "--workdir=" in ask("jaxscale train --")
    assert ask("jaxscale train --config.optim.peak") == ["--config.optim.peak_lr="]


@pytest.mark.parametrize("argv", [["fish"], ["bash", "zsh"], ["--shell=bash"]])
def test_another_shell_is_refused(argv):
    with pytest.raises(ValueError):
        completion.main(argv)


def first_command(text):
    """The first line of a help text behind its summary."""
    summary, blank, *lines = text.splitlines()
    assert summary.endswith(".") and blank == "", f"no summary of one line: {summary!r}"
    return lines[0]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_shows_an_example_first(verb, capsys):
    assert cli.dispatch([verb, "--help"]) == 0
    text = capsys.readouterr().out
    line = first_command(text)
    assert line.startswith(f"  jaxscale {verb} "), line
    assert shlex.split(line)[:2] == ["jaxscale", verb]


def test_each_verb_stands_in_one_group():
    assert sum(map(len, cli.GROUPS.values())) == len(cli.VERBS)
    text = cli.verbs_help()
    assert text.index("before a run:") < text.index("  plan ") < text.index("the run:") < text.index("  train  ")
    assert "\n   13  another process was lost" in text
