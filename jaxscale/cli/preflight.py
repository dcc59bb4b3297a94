"""Compiles the very step that training runs, for chips that are not here: does it fit, and what can it reach at best.

  jaxscale preflight --config=FILE --topology=v5p:4x4x8
  --topology=NAME         v5p:4x4x8 or v5p-256 (TensorCores), v5litepod-256, 2*v6e:16x16 (two slices), h100:32x8 (hosts
                          x cards), a100:32x8
  --config.NAME=VALUE     sets any setting, as in training
  --search                also compiles other meshes, remat policies and microbatches, and writes the best settings
  --search_seconds=600    time for these, and for the search for changes where the config does not fit
  --overrides=FILE        where --search writes them; default CONFIG-TOPOLOGY.flags
  --save_executable=FILE  writes the compiled step. Loading one was never tried: that needs the chips
  --json=FILE             writes the report
  --fresh                 compiles again what was compiled before (results are kept in the user's cache folder)

No device is touched, and none need be there; TPUs need the package libtpu, GPUs jax's CUDA plugin. Times are the least
that the chip's datasheet allows. Exit code 0: it fits; 3: it does not, and two changes that do are shown if they exist.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable

from jaxscale import config
from jaxscale.ahead import search
from jaxscale.ahead.preflight import preflight
from jaxscale.ahead.report import Report, report_lines, summary_rows
from jaxscale.ahead.search import Candidate, Tried, winner
from jaxscale.cli import run_verb
from jaxscale.command_line import Arguments, config_name, parse_arguments, take_switches, whole_number
from jaxscale.config import RunConfig
from jaxscale.help_text import show_help
from jaxscale.planning.tables import INDENT
from jaxscale.planning.topology import Topology, open_topology
from jaxscale.system.exits import BadInput, Exit, put
from jaxscale.system.paths import write_json, write_text_atomic

SWITCHES = ("search", "fresh")
OPTIONS = ("topology", "search_seconds", "overrides", "save_executable", "json")
Compile = Callable[[RunConfig], Report]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for beside a config and a topology."""

    config_name: str
    search: bool = False
    fresh: bool = False
    seconds: int = 600
    overrides: pathlib.Path | None = None
    save_executable: pathlib.Path | None = None
    json: pathlib.Path | None = None


def main(argv: list[str]) -> int:
    """Prints the report and returns the exit code."""
    rest, switches = take_switches(argv, OPTIONS, SWITCHES)
    arguments = parse_arguments(rest, (*OPTIONS, *SWITCHES))
    if arguments.help:
        show_help(__doc__, RunConfig, arguments.topic)
        return 0
    if "topology" not in arguments.options:
        raise BadInput("--topology must be given, such as --topology=v5p:4x4x8 or --topology=h100:8x8")
    request = Request(
        config_name=config_name(arguments.config),
        search="search" in switches,
        fresh="fresh" in switches,
        seconds=whole_number("search_seconds", arguments.options.get("search_seconds", "600"), 1),
        overrides=file_of("overrides", arguments),
        save_executable=file_of("save_executable", arguments),
        json=file_of("json", arguments),
    )
    cfg = config.load_config(arguments.config, arguments.overrides)
    return answer(cfg, open_topology(arguments.options["topology"]), request)


def answer(cfg: RunConfig, topology: Topology, request: Request) -> Exit:
    """Prints the report on the config, and on others where that was asked for or is needed; DONE or NO_GO."""
    compile_one = lambda wanted, file=None: preflight(
        wanted, topology, config_name=request.config_name, keep=not request.fresh, save_executable=file, say=say
    )
    report = compile_one(cfg, request.save_executable)
    put(*report_lines(report))
    if request.save_executable and report.fits:
        say(f"the compiled step is in {request.save_executable}; loading it needs the chips and was never tried")
    known, tried = [(search.own_candidate(cfg, topology), report)], []
    if request.search:
        tried = search_more(topology, known, compile_one, request.seconds)
        write_winner(tried, request.overrides or pathlib.Path(f"{request.config_name}-{file_name(topology)}.flags"))
    elif not report.fits and not (report.shortage and report.shortage.space != "hbm"):
        tried = repair(topology, known, compile_one, request.seconds)
    if request.json:
        others = [{"changes": one.changes, "report": found.to_dict()} for one, found in search.ranked(tried)]
        write_json(request.json, {"report": report.to_dict(), "others": others})
    return Exit.DONE if report.fits else Exit.NO_GO


def file_of(name: str, arguments: Arguments) -> pathlib.Path | None:
    """The file that an option names, or None. Raises BadInput before anything is compiled if it cannot be written."""
    if name not in arguments.options:
        return None
    file = pathlib.Path(arguments.options[name]).expanduser()
    if file.is_dir() or not file.parent.is_dir():
        raise BadInput(f"--{name}={file} must be a file in a folder that exists")
    return file


def file_name(topology: Topology) -> str:
    """The topology as part of a file's name: '2*v6e:16x16' -> '2-v6e-16x16'."""
    return topology.name.replace("*", "-").replace(":", "-")


def search_more(topology: Topology, known: Tried, compile_one: Compile, seconds: int) -> Tried:
    """Prints a table of other layouts, the best first, and returns all that was compiled, the known ones too."""
    say(f"\nsearching other layouts for {seconds} s")
    candidates = search.search_candidates(known[0][0].cfg, topology)
    say(f"{len(candidates)} could be compiled")
    tried = explore(candidates, known, compile_one, seconds)
    say("\n".join(["", *summary_rows([(one.label, found) for one, found in search.ranked(tried)])]))
    return tried


def repair(topology: Topology, known: Tried, compile_one: Compile, seconds: int) -> Tried:
    """Prints the two best changes that make a config fit, and returns all that was compiled, the known ones too."""
    say("\nlooking for changes that fit")
    tried = explore(search.repair_candidates(known[0][0].cfg, topology), known, compile_one, seconds, enough=2)
    found = search.fitting(search.ranked(tried))
    if found:
        flags = [INDENT + " ".join(search.override_lines(one.changes)) for one, _ in found]
        rows = summary_rows([(one.label, fits) for one, fits in found])
        say("\n".join(["", "compiled, and fits:", *rows, "with", *flags]))
    elif len(tried) > len(known):
        say("nothing that was compiled fits: more or larger chips, or a smaller model or batch, are needed")
    return tried


def explore(candidates: list[Candidate], known: Tried, compile_one: Compile, seconds: int, **more: int) -> Tried:
    """search.explore by this process's clock."""
    run = lambda candidate: compile_one(candidate.cfg)
    return search.explore(candidates, known, run, seconds=seconds, clock=time.monotonic, say=say, **more)


def write_winner(tried: Tried, file: pathlib.Path) -> None:
    """Writes the settings of the best layout, one flag a line."""
    best = winner(tried)
    if best is None:
        say("nothing that was compiled fits, so no settings are written")
        return
    lines = search.override_lines(best[0].changes)
    write_text_atomic(file, "".join(f"{line}\n" for line in lines))
    said = " ".join(lines) or "the config as it is, so the file is empty"
    say(f"the best: {said}\nwritten to {file}; train with: jaxscale train --config=... $(cat {file})")


def say(text: str) -> None:
    """Prints at once, for compiling takes long."""
    put(text)


if __name__ == "__main__":
    run_verb("preflight")
