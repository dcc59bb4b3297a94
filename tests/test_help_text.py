"""Help is as wide as the terminal, and settings are told by group."""

import re

import pytest

from jaxscale import cli, schema
from jaxscale.cli import plan, prepare
from jaxscale.config import RunConfig
from jaxscale.main import main
from jaxscale.settings.help_text import by_group, fit_width
from jaxscale.system.exits import BadInput


def said(capsys, verb, *flags):
    assert verb([*flags]) == 0
    return capsys.readouterr().out


def settings_in(text):
    return [name for name in re.findall(r"^  --config\.([\w.]+)=", text, re.MULTILINE) if name != "NAME"]


@pytest.mark.parametrize("verb, groups", [(main, ("optim", "hang")), (prepare.main, ("pii",)), (plan.main, ("mesh",))])
def test_help_lists_groups_and_help_with_a_group_its_settings(verb, groups, capsys):
    text = said(capsys, verb, "--help")
    assert settings_in(text) == [] and all(
        re.search(rf"^  {group} +\d+  [A-Z]", text, re.MULTILINE) for group in groups
    )
    for group in groups:
        found = settings_in(said(capsys, verb, "--help", group))
        assert found and all(name.startswith(f"{group}.") for name in found)


def test_help_all_lists_every_setting_and_each_is_in_one_group(capsys):
    names = [name for name, *_ in schema.describe(RunConfig)]
    assert sorted(settings_in(said(capsys, main, "--help", "all"))) == sorted(names)
    assert sum(map(len, by_group(RunConfig).values())) == len(names)
    assert "seed" in settings_in(said(capsys, main, "--help", "run"))


def test_a_group_that_is_not_there_is_told_with_the_nearest():
    with pytest.raises(BadInput, match="--help opti: unknown group of settings; did you mean optim"):
        main(["--help", "opti"])


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_page_is_wider_than_the_terminal_and_no_word_is_lost(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for verb in cli.VERBS:
        page, shown = cli.command_of(verb).page, fit_width(cli.command_of(verb).page)
        assert shown.split() == page.split()
        assert [line for line in shown.splitlines() if len(line) > columns and " " in line.strip()] == []
    text = "--flag=X    does this, and more of it than the width can take, told at length"
    assert fit_width(f"{text} {text[12:]}").splitlines()[1].startswith(" " * 12)
