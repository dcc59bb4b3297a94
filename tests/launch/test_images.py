"""The Dockerfiles, without a docker: what they copy is enough to install from, and what they name exists."""

import fnmatch
import re
import tomllib

import pytest
from scripts import LAUNCH, ROOT

KINDS = {"tpu": {"tpu", "gcs"}, "cuda": {"cuda12", "gcs"}}


def instructions(path):
    """[(instruction, rest of the line)] of a Dockerfile in which no instruction is longer than a line."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert not any(line.endswith("\\") for line in lines)
    return [tuple(line.split(maxsplit=1)) for line in lines]


def copied(path):
    """What COPY takes from the checkout."""
    return [source for word, rest in instructions(path) if word == "COPY" for source in rest.split()[:-1]]


def dockerfile(kind):
    return LAUNCH / "docker" / f"Dockerfile.{kind}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_extras_it_installs_are_those_of_the_package(kind):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (install,) = [rest for word, rest in instructions(dockerfile(kind)) if word == "RUN"]
    defaults = dict(rest.split("=") for word, rest in instructions(dockerfile(kind)) if word == "ARG")
    named = re.search(r"\.\[(.*?)\]", install).group(1)
    named = re.sub(r"\$\{(\w+)\}", lambda match: defaults[match.group(1)], named).split(",")
    assert set(named) == KINDS[kind] <= set(extras)


@pytest.mark.parametrize("kind", KINDS)
def test_its_python_is_one_that_the_package_supports_and_its_entry_point_is_the_trainer(kind):
    steps = instructions(dockerfile(kind))
    assert steps[0] == ("FROM", "python:3.12-slim")
    assert ("ENTRYPOINT", '["python", "-m", "jaxscale.main"]') in steps
    assert steps.index(("COPY", "configs ./configs")) > [word for word, _ in steps].index("RUN")  # a cached install


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_copies_is_sent_to_the_builder_and_nothing_else(kind):
    rules = (LAUNCH / "docker" / f"Dockerfile.{kind}.dockerignore").read_text().splitlines()
    rules = [rule for rule in rules if rule and not rule.startswith("#")]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert sorted(kept) == sorted(copied(dockerfile(kind)))
    assert all((ROOT / name).exists() for name in kept)
    assert not any(fnmatch.fnmatch(name, rule) for rule in rules[1:] if rule[0] != "!" for name in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_build_reads_is_copied_before_the_install(kind):
    steps = instructions(dockerfile(kind))
    before = [rest for word, rest in steps[: [word for word, _ in steps].index("RUN")] if word == "COPY"]
    there = {source for rest in before for source in rest.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert there >= {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert there >= {pattern.rstrip("*") for pattern in package}
    # COPY FOLDER puts what is in the folder, not the folder: its own name must be the target
    assert all(rest.split()[-1] == f"./{rest.split()[0]}" for rest in before if (ROOT / rest.split()[0]).is_dir())
