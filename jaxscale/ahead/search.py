"""Searches all mesh axes, remat policies and microbatches: guesses at every candidate, compiles the most promising."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

from jaxscale import schema, units
from jaxscale.ahead.layouts import Layout, all_layouts, layout_parts, layout_settings, schedules, spans
from jaxscale.ahead.preflight import ahead_program
from jaxscale.ahead.report import Report
from jaxscale.ahead.roofline import Roofline
from jaxscale.build import Program
from jaxscale.config import RunConfig
from jaxscale.models.config import RematName
from jaxscale.planning.memory import usable_memory
from jaxscale.planning.speed import Estimate, estimate
from jaxscale.planning.topology import Topology
from jaxscale.sharding.config import MESH_AXES
from jaxscale.sharding.mesh import mesh_shape
from jaxscale.system.exits import BadInput

HOPEFUL = 0.5  # of a guessed size, for a policy of which nothing was compiled yet: guesses are rather too large
MARGIN = 0.9  # of a size that was scaled by what a sibling needed
SURE = 1 / 3  # of the guessed wait for links: 38% to 72% of it was left in compiled programs (docs/plan.md)
SAME_TIME = 1.01  # times this close are one time, and the next criterion decides
LAST_TRIES = 2  # of the smallest candidates, where no guess fits


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The config with some settings changed."""

    changes: dict[str, Any]  # by dotted name
    cfg: RunConfig
    guess: Estimate

    @property
    def label(self) -> str:
        """'mesh.tensor=2 model.remat=full'."""
        return " ".join(f"{name}={setting_text(value)}" for name, value in self.changes.items()) or "as it is"

    @property
    def order(self) -> tuple[float, ...]:
        """The sooner compiled, the smaller: guessed time, the same without overlap, number of changes, memory."""
        overlapped, serial = self.guess.cost
        return bucket(overlapped), bucket(serial), len(self.changes), self.guess.memory()


Compile = Callable[[Candidate], Report]
Tried = list[tuple[Candidate, Report]]


def search_candidates(cfg: RunConfig, topology: Topology, say: Callable[[str], None] | None = None) -> list[Candidate]:
    """Every layout of all mesh axes, with every remat policy and number of microbatches that goes with it.

    Says what was looked at by arithmetic.
    """
    layouts = list(all_layouts(cfg, len(topology.devices), topology.num_slices))
    found = list(make_candidates(cfg, topology, layouts, [cfg.rules], [cfg.optim.offload_moments]))
    if say and found:
        meshes = len({tuple(getattr(one.cfg.mesh, axis) for axis in MESH_AXES) for one in found})
        say(f"{len(found):,} settings guessed at, on {meshes:,} meshes ({spans(layouts)}){tried_text(found)}")
        for line in fastest_lines(found, usable_memory(topology)[0]):
            say(line)
    return found


def tried_text(found: Sequence[Candidate]) -> str:
    """'; schedules 1f1b, zero_bubble; experts are gathered, or rows sent to them', as far as there are such."""
    staged = [one.cfg.pipeline.schedule for one in found if one.cfg.mesh.pipeline != 1]
    forms = [one.guess.exchange for one in found if one.guess.exchange]
    words = {"gather": "gathered to rows", "send": "sent rows"}
    said = f"; schedules {', '.join(dict.fromkeys(staged))}" if staged else ""
    return said + (f"; experts are {' or '.join(words[form] for form in dict.fromkeys(forms))}" if forms else "")


def fastest_lines(found: Sequence[Candidate], usable: float) -> list[str]:
    """Which are the fastest by arithmetic alone: of large programs few are compiled in the time that there is."""
    best = min(found, key=lambda one: one.guess.cost)
    fits = min((one for one in found if one.guess.memory() <= usable), key=lambda one: one.order, default=None)
    told = lambda one: f"{one.label}, {units.size(one.guess.memory())}, {cost_text(one.guess)}"
    if fits is best:
        return [f"the fastest by arithmetic, which fits: {told(best)}"]
    second = f"of those that fit: {told(fits)}" if fits else f"none fits into {units.size(usable)}"
    return [f"the fastest by arithmetic, whether it fits or not: {told(best)}", second]


def repair_candidates(cfg: RunConfig, topology: Topology) -> list[Candidate]:
    """What may make a config fit that does not: also zero3, and moments in the host's memory. Not the config itself."""
    current = mesh_shape(cfg.mesh, len(topology.devices))
    layouts = [
        layout
        for layout in all_layouts(cfg, len(topology.devices), topology.num_slices)
        if layout["data"] in (1, current["data"]) and layout["pipeline"] in (1, current["pipeline"])
    ]
    rules = list(dict.fromkeys([cfg.rules, "zero3"]))
    offload = list(dict.fromkeys([cfg.optim.offload_moments, True]))
    return [found for found in make_candidates(cfg, topology, layouts, rules, offload) if found.changes]


def make_candidates(
    cfg: RunConfig,
    topology: Topology,
    layouts: Sequence[Layout],
    rules: Sequence[str],
    offload: Sequence[bool],
) -> Iterator[Candidate]:
    """Candidates with their guesses, of all combinations that training would accept."""
    now = mesh_shape(cfg.mesh, len(topology.devices))
    # an axis that is -1 goes on taking what is left
    kept = {f"mesh.{axis}" for axis in MESH_AXES if getattr(cfg.mesh, axis) == -1}
    for layout, rule, away in itertools.product(layouts, rules, offload):
        wished = layout_settings(cfg, layout) | {"rules": rule, "optim.offload_moments": away}
        placed = {f"mesh.{axis}" for axis in MESH_AXES if layout[axis] == now[axis]} | kept
        changes = changed(cfg, {name: value for name, value in wished.items() if name not in placed})
        parts = layout_parts(cfg, layout)
        if not parts or not (program := program_of(cfg, topology, changes | {"train.num_microbatches": parts[0]})):
            continue
        staged = [{"pipeline.schedule": name} for name in schedules(cfg, layout)]
        for settings in staged or remat_settings(cfg):
            base = with_changes(cfg, changes | changed(cfg, settings))
            for part in parts:
                more = changed(cfg, settings | {"train.num_microbatches": part})
                wanted = dataclasses.replace(base, train=dataclasses.replace(base.train, num_microbatches=part))
                guess = estimate(dataclasses.replace(program, cfg=wanted), topology)
                yield Candidate(changes | more, wanted, guess)


def program_of(cfg: RunConfig, topology: Topology, changes: dict[str, Any]) -> Program | None:
    """The program of a changed config, to be guessed at, or None where training would refuse it."""
    try:  # options for the compiler change no guess, and checking them costs a compilation each time
        return ahead_program(with_changes(cfg, changes | {"compiler": {}}), topology)
    except BadInput:  # an axis that divides no heads, a mesh across slices, a platform without host memory, ...
        return None


def remat_settings(cfg: RunConfig) -> Iterator[dict[str, Any]]:
    """The settings of every remat policy; one that needs lists of names only as the config has it."""
    lists = {"model.remat_save": cfg.model.remat_save, "model.remat_offload": cfg.model.remat_offload}
    yield {"model.remat": cfg.model.remat} | lists
    for name in get_args(RematName):
        if name not in ("save", cfg.model.remat):
            whole = {"model.row_parts": 1} if name == "none" and cfg.model.row_parts > 1 else {}  # it would be unread
            yield {"model.remat": name, "model.remat_save": (), "model.remat_offload": ()} | whole


def with_changes(cfg: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """The config with settings changed by dotted name."""
    return schema.from_dict(RunConfig, schema.merge(schema.to_dict(cfg), changes))


def changed(cfg: RunConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Those settings that differ from the config's."""
    return {name: value for name, value in settings.items() if operator.attrgetter(name)(cfg) != value}


def own_candidate(cfg: RunConfig, topology: Topology) -> Candidate:
    """The config as it is, with its guess."""
    return Candidate({}, cfg, estimate(ahead_program(cfg, topology), topology))


def explore(
    candidates: Sequence[Candidate],
    known: Tried,
    compile_one: Compile,
    *,
    seconds: float,
    clock: Callable[[], float],
    say: Callable[[str], None],
    enough: int | None = None,
) -> Tried:
    """Compiles candidates, the best guess first, until time is up or nothing promising is left; all that was compiled.

    What was learnt from one compilation corrects the guesses of others. Where nothing is guessed to fit, the smallest
    are compiled, to see.
    known: what was compiled already, which comes back first. enough: stop when so many fit.
    """
    begin, tries, tried = clock(), 0, list(known)
    longest = max((report.lower_seconds + report.compile_seconds for _, report in known), default=0.0)
    left = [one for one in candidates if all(one.changes != other.changes for other, _ in known)]
    while left and (enough is None or len(fitting(tried)) < enough):
        hopeful = [one for one in left if is_hopeful(one, tried, enough)]
        if not hopeful and (fitting(tried) or tries == LAST_TRIES):
            break
        if clock() - begin + longest > seconds:
            count = len(hopeful) or LAST_TRIES - tries
            took = f"and the longest took {longest:.0f} s"
            say(f"time is up ({seconds:.0f} s): {count} more could be compiled, {took}; --search_seconds gives more")
            break
        if hopeful:
            chosen = min(hopeful, key=lambda one: one.order)
        else:
            tries += 1
            chosen = min(left, key=lambda one: one.guess.memory())
        left.remove(chosen)
        say(f"compiling {chosen.label} (guess: {guess_text(chosen, tried)})")
        started = clock()
        report = compile_one(chosen)
        longest = max(longest, clock() - started)
        tried.append((chosen, report))
        say(f"  {outcome_text(report)}")
    return tried


def is_hopeful(one: Candidate, tried: Tried, enough: int | None) -> bool:
    """True if a candidate may fit, and may be better than what was compiled."""
    usable = min((report.usable_bytes for _, report in tried), default=math.inf)
    if one.guess.memory(learnt_scale(one, tried)) > usable:
        return False
    for other, report in tried:
        if not report.fits and needs_as_much(one, other):
            return False
        if report.fits and enough and other.changes.items() <= one.changes.items():
            return False  # the same repair, and more than that
    best = winner(tried)
    least = one.guess.least_s + SURE * one.guess.exposed_s
    return bool(enough) or best is None or least <= bounds_of(best[1]).at_least_s * SAME_TIME


def learnt_scale(one: Candidate, tried: Tried) -> float:
    """How many times larger than guessed the activations of a candidate will be, going by what was compiled.

    The last one of its remat policy tells it, with or without a pipeline and rows that are sent as it is, else the last
    of any; without one it is a hope.
    """
    measured = [
        (other, report.peak_bytes)
        for other, report in tried
        if report.peak_bytes is not None and other.guess.activation_bytes
    ]
    kind = lambda one: (one.cfg.model.remat, one.cfg.mesh.pipeline != 1, one.guess.exchange)
    alike = [both for both in measured if kind(both[0]) == kind(one)]
    if not measured:
        return HOPEFUL
    other, peak_bytes = (alike or measured)[-1]
    return MARGIN * max(0, peak_bytes - other.guess.state_bytes) / other.guess.activation_bytes


def needs_as_much(one: Candidate, failed: Candidate) -> bool:
    """True if a candidate differs from one that did not fit by fewer microbatches only."""
    parts = "train.num_microbatches"
    rest = lambda candidate: {name: value for name, value in candidate.changes.items() if name != parts}
    fewer = one.cfg.train.num_microbatches <= failed.cfg.train.num_microbatches
    return fewer and rest(one) == rest(failed)


def fitting(tried: Tried) -> Tried:
    """Those that fit."""
    return [pair for pair in tried if pair[1].fits]


def ranked(tried: Tried) -> Tried:
    """The best first: those that fit by their roofline, then those that do not by what they lack."""
    return sorted(tried, key=rank)


def rank(pair: tuple[Candidate, Report]) -> tuple[float, ...]:
    """The smaller, the better. Times within 1% are one time; then less time without overlap, then less memory."""
    _, report = pair
    if not report.fits:
        return (1, report.peak_bytes or math.inf)
    bounds = bounds_of(report)
    assert report.peak_bytes is not None, "a step fits only if its peak is known"
    return (0, bucket(bounds.at_least_s), bounds.serial_s, report.peak_bytes)


def bounds_of(report: Report) -> Roofline:
    """Returns the roofline of a step that fits."""
    assert report.roofline is not None, "a step that fits was compiled, and make_report gives it a roofline"
    return report.roofline


def winner(tried: Tried) -> tuple[Candidate, Report] | None:
    """The best that fits, or None."""
    return min(fitting(tried), key=rank, default=None)


def why_lines(tried: Tried) -> list[str]:
    """Why the best of those that fit is it: its time by part, beside that of the next and of the config as it is."""
    best, *rest = fitting(ranked(tried))
    lines = [f"{best[0].label} wins: {parts_text(bounds_of(best[1]))}"]
    own = [pair for pair in tried if not pair[0].changes and pair is not best]
    for one, report in [*(pair for pair in rest[:1] if pair[0].changes), *own]:
        name = f"next, {one.label}" if one.changes else "the config as it is"
        lines.append(f"{name}: {parts_text(bounds_of(report)) if report.fits else 'does not fit'}")
    return lines


def parts_text(line: Roofline) -> str:
    """'at least 12 ms a step: products 9 ms, bubble 1 ms, waiting for links 2 ms'."""
    parts = [
        ("products", line.compute_s),
        ("bubble", line.bubble_s),
        ("waiting for links", sum(line.exposed_s.values())),
    ]
    said = ", ".join(f"{name} {seconds * 1e3:.4g} ms" for name, seconds in parts if seconds)
    return f"at least {line.at_least_s * 1e3:.4g} ms a step: {said or 'nothing that is counted'}"


def cost_text(guess: Estimate) -> str:
    """'12 ms: products 9 ms, waiting for stages 1 ms, for links 2 ms'."""
    parts = [("products", guess.compute_s), ("waiting for stages", guess.idle_s), ("for links", guess.exposed_s)]
    said = ", ".join(f"{name} {seconds * 1e3:.4g} ms" for name, seconds in parts if seconds)
    return f"{guess.cost[0] * 1e3:.4g} ms: {said}"


def bucket(seconds: float) -> int:
    """The time in steps of SAME_TIME."""
    return round(math.log(max(seconds, 1e-12)) / math.log(SAME_TIME))


def guess_text(candidate: Candidate, tried: Tried) -> str:
    """'12 ms, 20.1 GiB'."""
    memory = candidate.guess.memory(learnt_scale(candidate, tried))
    return f"{candidate.guess.cost[0] * 1e3:.4g} ms, {units.size(memory)}"


def outcome_text(report: Report) -> str:
    """'fits: 20.1 GiB, at least 13 ms' or 'does not fit: 40.2 GiB'."""
    size = units.size(report.peak_bytes) if report.peak_bytes is not None else "more than there is"
    if not report.fits:
        return f"does not fit: {size}"
    return f"fits: {size}, at least {bounds_of(report).at_least_s * 1e3:.4g} ms a step"


def override_lines(changes: dict[str, Any]) -> list[str]:
    """'--config.mesh.tensor=2' for each change; no line has a space, so that a shell may split them."""
    return [f"--config.{name}={setting_text(value)}" for name, value in changes.items()]


def setting_text(value: Any) -> str:
    """A value as the command line reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(tuple(value)).replace(" ", "") if isinstance(value, (tuple, list)) else str(value)
