"""Whether a command's verb, flags and settings are real, asked of the parsers that would read them."""

import contextlib
import importlib
import io
import pathlib
import re
import tomllib

from shell_blocks import ROOT

from jaxscale import cli
from jaxscale.cli import prepare
from jaxscale.settings import config_file

STANDS_FOR_A_CONFIG = ("FILE", "CONFIG.py", "...")
WITHOUT_SETTINGS = ("completion", "ckpt", "report", "watch", "trace", "supervise")


def problem_of(words: tuple[str, ...]) -> str:
    """What is wrong with a command, in one line; '' if nothing is. It is parsed, and not run."""
    try:
        check(list(words))
    except ValueError as error:
        return str(error)
    return ""


def check(words: list[str]) -> None:
    """Raises ValueError for a verb, flag, setting, extra or file that is not there."""
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # NAME=VALUE command
        words = words[1:]
    if not words:
        return
    program, *rest = words
    if program == "srun":
        check(rest)
    elif program == "jaxscale":
        check_verb(rest)
    elif words[:2] == ["python", "-m"] and words[2].startswith("jaxscale"):
        modules = {cli.module_of(verb): verb for verb in cli.VERBS}
        if words[2] not in modules:
            raise ValueError(f"{words[2]} is no verb's module")
        check_verb([modules[words[2]], *words[3:]])
    elif words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        importlib.import_module(words[2]).main([*words[3:], "--help"])
    elif program.startswith("--"):
        check_verb(["train", *words])
    elif program == "pip":
        check_pip(rest)
    elif program.startswith("launch/") or program == "sbatch":
        check_launch(words)
    else:
        check_files(words)


def check_verb(words: list[str]) -> None:
    """`jaxscale VERB ...`: asks the verb's own parser: --help behind all flags makes it read them, and no more."""
    verb, *flags = words
    if verb in ("--help", "-h"):
        return
    if verb not in cli.VERBS:
        raise ValueError(f"jaxscale has no verb {verb!r}")
    flags = [flag for flag in flags if flag != "[FLAGS]"]
    if "--" in flags:
        cut = flags.index("--")
        if verb == "supervise" and len(flags) > cut + 1:
            inner = flags[cut + 1 :]
            check(["jaxscale", "train", *inner] if inner[0].startswith("--") else inner)
        flags = flags[:cut]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = cli.command_of(verb)([*flags, "--help"])
    if code or not said.getvalue():
        raise ValueError(
            f"jaxscale {verb} {' '.join(flags)} --help ends with {code} and {len(said.getvalue())} characters"
        )
    if verb not in WITHOUT_SETTINGS:
        check_settings(verb, flags)


def check_settings(verb: str, flags: list[str]) -> None:
    """Builds the config that the command names with the settings that it gives."""
    if verb == "bench" and flags[:1] == ["data"]:  # its settings are a recipe's
        verb, flags = "prepare", [flag.replace("--recipe=", "--config=", 1) for flag in flags]
    file = next((flag.removeprefix("--config=") for flag in flags if flag.startswith("--config=")), "")
    values = dict(flag.removeprefix("--config.").split("=", 1) for flag in flags if flag.startswith("--config."))
    same = [
        (name, f"--{short}=") for short, name in config_file.FLAG_SETTINGS if verb == "train" and short != "skip-data"
    ]
    values |= [(name, flag.removeprefix(start)) for name, start in same for flag in flags if flag.startswith(start)]
    if any(flag.startswith("--decay_tokens=") for flag in flags):  # it is for a decay
        values["optim.decay"] = "wsd"
    if not file and not values:
        return
    file = "configs/quickstart.py" if file in (*STANDS_FOR_A_CONFIG, "") and verb != "prepare" else file
    path, _, argument = file.partition(":")
    argument = argument.partition(",runs/")[0]  # a run that a reader has, and this check has not
    place = f"{ROOT / path}{':' if argument else ''}{argument}"
    if verb == "prepare":
        if "--index" in flags:
            prepare.load_rows(place if file else "", values)
            return
        source = next((flag.removeprefix("--input=") for flag in flags if flag.startswith("--input=")), None)
        prepare.load_recipe(place if file else "", values, source)
    else:
        config_file.load_config(place, values)


def check_pip(words: list[str]) -> None:
    """Extras that are asked for must be in pyproject.toml, and files must be there."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        for extra in re.findall(r"\[([^\]]+)\]", word):
            if missing := sorted(set(extra.split(",")) - set(known)):
                raise ValueError(f"pyproject.toml has no extra {missing[0]}")
        if word.endswith(".txt") and not (ROOT / word).is_file():
            raise ValueError(f"{word} is no file")


def check_launch(words: list[str]) -> None:
    """A script of launch/ must be there, and what it hands to training must be right."""
    script = next((word for word in words if word.startswith("launch/")), "")
    if not (ROOT / script).is_file():
        raise ValueError(f"{script or words[0]} is no script of launch/")
    if script.endswith(".sbatch"):
        check_verb(["train", *words[words.index(script) + 1 :]])
    elif "--" in words:
        check_verb(["train", *words[words.index("--") + 1 :]])


def check_files(words: list[str]) -> None:
    """Files and folders of this repository that are named must be there."""
    for word in words:
        if re.match(r"(tests|docs|configs|launch|jaxscale|\.ci)/", word) and not (ROOT / pathlib.Path(word)).exists():
            raise ValueError(f"{word} is not in the repository")
