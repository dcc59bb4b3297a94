"""Compiles the training step for chips you do not have. Reports memory use and a lower bound of the step time.

  jaxscale preflight --config=FILE --topology=v5p:4x4x8

Needs no device; TPUs need the package libtpu, GPUs need jax's CUDA plugin. Times are lower bounds from the chip's
datasheet and the order of the program; --collectives shows which communication overlaps with matmuls. Exit code 0: the
step fits; 3: it does not, and up to two changes that make it fit are printed.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable

from jaxscale.api.planning import run_to_resume
from jaxscale.config import RunConfig
from jaxscale.program.auto_dtype import device_dtypes
from jaxscale.settings import config_file
from jaxscale.settings.command_line import Arguments, file_to_write, flag
from jaxscale.settings.help_text import command
from jaxscale.system.exits import BadInput, Exit, put
from jaxscale.system.paths import write_json, write_text_atomic
from jaxscale.tools.planning.topology import Topology, open_topology
from jaxscale.tools.preflight import search
from jaxscale.tools.preflight.preflight import preflight
from jaxscale.tools.preflight.search import Candidate, Tried, winner
from jaxscale.tools.preflight.step_report import PreflightReport, collective_lines, report_lines, summary_rows
from jaxscale.units import INDENT

Compile = Callable[[RunConfig], PreflightReport]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreflightFlags:
    config: str = flag("", None, "FILE")
    topology: str = flag(
        "",
        "v5p:4x4x8 or v5p-256 (TensorCores), v5litepod-256, 2*v6e:16x16 (two slices), h100:32x8 (hosts x cards), "
        "a100:32x8",
        "NAME",
    )
    workdir: str | None = flag(
        None, "a run to resume: finished stages of batch_ramp and seq_len_ramp need not fit", "FOLDER"
    )
    settings: dict[str, str] = flag(dict, "sets any setting, as in training", "VALUE", name="config.NAME")
    collectives: bool = flag(False, "also prints each collective's bytes, and how much of it overlaps with matmuls")
    search: bool = flag(
        False, "also compiles other meshes, remat policies and microbatches, and writes the best settings"
    )
    search_seconds: int = flag(
        600, "time limit of --search, and of the search for changes if the config does not fit", least=1
    )
    overrides: pathlib.Path | None = flag(
        None, "file for the settings of --search; default CONFIG-TOPOLOGY.flags", "FILE", read=file_to_write
    )
    save_executable: pathlib.Path | None = flag(
        None,
        "writes the compiled step. Loading it requires the chips and has not been tested",
        "FILE",
        read=file_to_write,
    )
    json: pathlib.Path | None = flag(None, "writes the report as JSON", "FILE", read=file_to_write)
    fresh: bool = flag(False, "ignores earlier results in the user's cache folder")


@command(PreflightFlags, settings=RunConfig)
def main(arguments: Arguments) -> Exit:
    """Prints the report and returns the exit code."""
    flags = arguments.flags
    if not flags.topology:
        raise BadInput("--topology must be given, such as --topology=v5p:4x4x8 or --topology=h100:8x8")
    return answer(config_file.load_config(arguments.config, arguments.overrides), open_topology(flags.topology), flags)


def answer(cfg: RunConfig, topology: Topology, flags: PreflightFlags) -> Exit:
    """Prints the report on the config, and on alternatives if requested or needed. Returns DONE or NO_GO."""
    name = config_file.config_name(flags.config)
    position, recorded = run_to_resume(flags.workdir)
    cfg, dtypes = device_dtypes(cfg, topology.devices[0], recorded)
    put(*map(str, dtypes))
    compile_one = lambda candidate, file=None: preflight(
        candidate, topology, config_name=name, keep=not flags.fresh, save_executable=file, say=put, position=position
    )
    report = compile_one(cfg, flags.save_executable)
    put(*report_lines(report))
    if flags.collectives:
        put(*collective_lines(report.collectives))
    if flags.save_executable and report.fits:
        put(f"the compiled step is written to {flags.save_executable}; loading it requires the chips and is untested")
    known, tried = [(search.unchanged_candidate(cfg, topology), report)], []
    if flags.search:
        put(f"\nsearching other layouts for up to {flags.search_seconds} s")
        candidates = search.search_candidates(known[0][0].cfg, topology, put)
        tried = explore(candidates, known, compile_one, flags.search_seconds)
        put("\n".join(["", *summary_rows([(one.label, found) for one, found in search.ranked(tried)])]))
        chips = topology.name.replace("*", "-").replace(":", "-")  # '2*v6e:16x16' -> '2-v6e-16x16'
        write_winner(tried, flags.overrides or pathlib.Path(f"{name}-{chips}.flags"))
    elif not report.fits and not (report.shortage and report.shortage.space != "hbm"):
        tried = repair(topology, known, compile_one, flags.search_seconds)
    if flags.json:
        others = [{"changes": one.changes, "report": found.to_dict()} for one, found in search.ranked(tried)]
        write_json(flags.json, {"report": report.to_dict(), "others": others})
    return Exit.DONE if report.fits else Exit.NO_GO


def repair(topology: Topology, known: Tried, compile_one: Compile, seconds: int) -> Tried:
    """Prints the two best changes that make a config fit. Returns the results of all candidates, `known` first."""
    put("\nsearching for changes that fit")
    tried = explore(search.repair_candidates(known[0][0].cfg, topology), known, compile_one, seconds, enough=2)
    found = search.fitting(search.ranked(tried))
    if found:
        flags = [INDENT + " ".join(search.override_lines(one.changes)) for one, _ in found]
        rows = summary_rows([(one.label, fits) for one, fits in found])
        put("\n".join(["", "these compile and fit:", *rows, "their flags:", *flags]))
    elif len(tried) > len(known):
        put("no compiled layout fits; use more or larger chips, or a smaller model or batch")
    return tried


def explore(candidates: list[Candidate], known: Tried, compile_one: Compile, seconds: int, **more: int) -> Tried:
    """Runs search.explore with this process's clock."""
    run = lambda candidate: compile_one(candidate.cfg)
    return search.explore(candidates, known, run, seconds=seconds, clock=time.monotonic, say=put, **more)


def write_winner(tried: Tried, file: pathlib.Path) -> None:
    """Writes the settings of the best layout, one flag per line."""
    best = winner(tried)
    if best is None:
        put("no compiled layout fits, so no settings are written")
        return
    put("", *search.winner_lines(tried))
    lines = search.override_lines(best[0].changes)
    write_text_atomic(file, "".join(f"{line}\n" for line in lines))
    settings = " ".join(lines) or "the unchanged config, so the file is empty"
    put(f"best settings: {settings}\nwritten to {file}; train with: jaxscale train --config=... $(cat {file})")
