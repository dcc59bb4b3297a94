"""Search over mesh axes, remat policies and microbatches, by estimating all and compiling promising candidates."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

from jaxscale import schema, units
from jaxscale.config import RunConfig
from jaxscale.core.config import MESH_AXES
from jaxscale.core.mesh import mesh_shape
from jaxscale.core.models.config import RematName
from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.memory import usable_memory
from jaxscale.tools.planning.speed import StepEstimate, estimate_step
from jaxscale.tools.planning.topology import Topology
from jaxscale.tools.preflight.layouts import MeshSizes, all_layouts, layout_settings, microbatch_choices
from jaxscale.tools.preflight.preflight import ahead_program
from jaxscale.tools.preflight.roofline import Roofline
from jaxscale.tools.preflight.step_report import PreflightReport

PRIOR_SCALE = 0.5  # scale of estimated activations before any compilation, since estimates tend to be too large
MARGIN = 0.9  # factor for activations that are scaled by the result of a different candidate
MIN_EXPOSED = 1 / 3  # least exposed fraction of estimated communication; 38% to 72% when compiled (docs/plan.md)
SAME_TIME = 1.01  # largest ratio of times that count as equal
LAST_TRIES = 2  # number of smallest candidates to compile if no estimate fits


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A config with changed settings and its estimate."""

    changes: dict[str, Any]  # {dotted name: value}
    cfg: RunConfig
    estimate: StepEstimate

    @property
    def label(self) -> str:
        """Text such as 'mesh.tensor=2 model.remat=full', or 'unchanged'."""
        return " ".join(f"{name}={setting_text(value)}" for name, value in self.changes.items()) or "unchanged"

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key for the next candidate to compile: time, time without overlap, number of changes, memory."""
        overlapped, serial = self.estimate.cost
        return bucket(overlapped), bucket(serial), len(self.changes), self.estimate.memory()


Compile = Callable[[Candidate], PreflightReport]
Tried = list[tuple[Candidate, PreflightReport]]


def search_candidates(cfg: RunConfig, topology: Topology, say: Callable[[str], None] | None = None) -> list[Candidate]:
    """Returns all valid combinations of mesh, remat policy and number of microbatches."""
    layouts = list(all_layouts(cfg, len(topology.devices), topology.num_slices))
    found = list(make_candidates(cfg, topology, layouts, [cfg.rules], [cfg.optim.offload_moments]))
    if say and found:
        meshes = len({tuple(getattr(one.cfg.mesh, axis) for axis in MESH_AXES) for one in found})
        tried = {axis: sorted({layout[axis] for layout in layouts}) for axis in MESH_AXES}
        sizes = "; ".join(f"{axis} {', '.join(map(str, some))}" for axis, some in tried.items() if len(some) > 1)
        say(f"{len(found):,} candidates estimated on {meshes:,} meshes ({sizes}){choices_text(found)}")
        for line in fastest_lines(found, usable_memory(topology)[0]):
            say(line)
    return found


def choices_text(found: Sequence[Candidate]) -> str:
    """Returns text such as '; schedules 1f1b, zero_bubble; experts: weights gathered or tokens sent'."""
    staged = [one.cfg.pipeline.schedule for one in found if one.cfg.mesh.pipeline != 1]
    forms = [one.estimate.exchange for one in found if one.estimate.exchange]
    words = {"gather": "weights gathered", "send": "tokens sent"}
    text = f"; schedules {', '.join(dict.fromkeys(staged))}" if staged else ""
    return text + (f"; experts: {' or '.join(words[form] for form in dict.fromkeys(forms))}" if forms else "")


def fastest_lines(found: Sequence[Candidate], usable: float) -> list[str]:
    """Returns lines with the candidates of lowest estimated time, overall and among those that fit."""
    best = min(found, key=lambda one: one.estimate.cost)
    fits = min((one for one in found if one.estimate.memory() <= usable), key=lambda one: one.order, default=None)

    def text(one: Candidate) -> str:
        estimate = one.estimate
        times = {"matmuls": estimate.compute_s, "pipeline idle": estimate.idle_s}
        parts = parts_text(times | {"exposed communication": estimate.exposed_s})
        return f"{one.label}, {units.size(estimate.memory())}, {estimate.cost[0] * 1e3:.4g} ms: {parts}"

    if fits is best:
        return [f"fastest estimate, which fits: {text(best)}"]
    second = f"fastest estimate that fits: {text(fits)}" if fits else f"none fits in {units.size(usable)}"
    return [f"fastest estimate, fitting or not: {text(best)}", second]


def repair_candidates(cfg: RunConfig, topology: Topology) -> list[Candidate]:
    """Returns changed configs that may fit in memory. Changes include zero3 and offloaded moments."""
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
    cfg: RunConfig, topology: Topology, layouts: Sequence[MeshSizes], rules: Sequence[str], offload: Sequence[bool]
) -> Iterator[Candidate]:
    """Yields candidates with estimates for all combinations that training accepts."""
    current = mesh_shape(cfg.mesh, len(topology.devices))
    # an axis of -1 uses the remaining devices
    free = {f"mesh.{axis}" for axis in MESH_AXES if getattr(cfg.mesh, axis) == -1}
    for layout, rule, offload_moments in itertools.product(layouts, rules, offload):
        requested = layout_settings(cfg, layout) | {"rules": rule, "optim.offload_moments": offload_moments}
        unchanged = {f"mesh.{axis}" for axis in MESH_AXES if layout[axis] == current[axis]} | free
        changes = changed(cfg, {name: value for name, value in requested.items() if name not in unchanged})
        parts = microbatch_choices(cfg, layout)
        if not parts:
            continue
        try:  # compiler options do not change the estimate, and validating them costs a compilation
            tried = changes | {"train.num_microbatches": parts[0], "compiler": {}}
            program = ahead_program(with_changes(cfg, tried), topology)
        except BadInput:  # an axis that divides no heads, a mesh across slices, a platform without host memory, ...
            continue
        names = dict.fromkeys([cfg.pipeline.schedule, "1f1b", "zero_bubble"])  # these two save few inputs
        schedules = [{"pipeline.schedule": name} for name in names]
        for settings in schedules if layout["pipeline"] > 1 else remat_settings(cfg):
            base = with_changes(cfg, changes | changed(cfg, settings))
            for part in parts:
                further = changed(cfg, settings | {"train.num_microbatches": part})
                candidate_cfg = dataclasses.replace(base, train=dataclasses.replace(base.train, num_microbatches=part))
                estimate = estimate_step(program.with_cfg(candidate_cfg), topology)
                yield Candidate(changes | further, candidate_cfg, estimate)


def remat_settings(cfg: RunConfig) -> Iterator[dict[str, Any]]:
    """Yields the settings of each remat policy. Only the policy of the config uses the name lists of the config."""
    lists = {"model.remat_save": cfg.model.remat_save, "model.remat_offload": cfg.model.remat_offload}
    yield {"model.remat": cfg.model.remat} | lists
    for name in get_args(RematName):
        if name not in ("save", cfg.model.remat):
            unused = {"model.row_parts": 1} if name == "none" and cfg.model.row_parts > 1 else {}  # without remat
            yield {"model.remat": name, "model.remat_save": (), "model.remat_offload": ()} | unused


def with_changes(cfg: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """Returns the config with changed settings. changes: {dotted name: value}."""
    return schema.from_dict(RunConfig, schema.merge(schema.to_dict(cfg), changes))


def changed(cfg: RunConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that differ from the config."""
    return {name: value for name, value in settings.items() if operator.attrgetter(name)(cfg) != value}


def unchanged_candidate(cfg: RunConfig, topology: Topology) -> Candidate:
    """Returns the unchanged config with its estimate."""
    return Candidate({}, cfg, estimate_step(ahead_program(cfg, topology), topology))


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
    """Compiles the most promising candidates until none is left or the time is up. Returns all results.

    Each compilation corrects the estimates of other candidates. If no candidate fits by estimate, compiles those that
    need the least memory. known: earlier results, returned first. enough: number of results that fit at which to stop.
    """
    begin, tries, tried = clock(), 0, list(known)
    longest = max((report.lower_seconds + report.compile_seconds for _, report in known), default=0.0)
    left = [one for one in candidates if all(one.changes != other.changes for other, _ in known)]
    while left and (enough is None or len(fitting(tried)) < enough):
        promising = [one for one in left if is_promising(one, tried, enough)]
        if not promising and (fitting(tried) or tries == LAST_TRIES):
            break
        if clock() - begin + longest > seconds:
            count = len(promising) or LAST_TRIES - tries
            took = f"the longest took {longest:.0f} s"
            say(f"time limit reached ({seconds:.0f} s): {count} not compiled, {took}; increase --search_seconds")
            break
        if promising:
            chosen = min(promising, key=lambda one: one.order)
        else:
            tries += 1
            chosen = min(left, key=lambda one: one.estimate.memory())
        left.remove(chosen)
        memory = units.size(chosen.estimate.memory(activation_scale(chosen, tried)))
        say(f"compiling {chosen.label} (estimate: {chosen.estimate.cost[0] * 1e3:.4g} ms, {memory})")
        started = clock()
        report = compile_one(chosen)
        longest = max(longest, clock() - started)
        tried.append((chosen, report))
        size = units.size(report.peak_bytes) if report.peak_bytes is not None else "more than available"
        fit = f"fits: {size}, at least {bounds_of(report).at_least_s * 1e3:.4g} ms per step" if report.fits else ""
        say(f"  {fit or f'does not fit: {size}'}")
    return tried


def is_promising(one: Candidate, tried: Tried, enough: int | None) -> bool:
    """Returns True if a candidate may fit, and may be better than the compiled candidates."""
    usable = min((report.usable_bytes for _, report in tried), default=math.inf)
    if one.estimate.memory(activation_scale(one, tried)) > usable:
        return False
    for other, report in tried:
        if not report.fits and needs_as_much(one, other):
            return False
        if report.fits and enough and other.changes.items() <= one.changes.items():
            return False  # fewer changes already fit
    best = winner(tried)
    least = one.estimate.least_s + MIN_EXPOSED * one.estimate.exposed_s
    return bool(enough) or best is None or least <= bounds_of(best[1]).at_least_s * SAME_TIME


def activation_scale(one: Candidate, tried: Tried) -> float:
    """Returns the expected ratio of actual to estimated activation memory, from earlier compilations."""
    kind = lambda one: (one.cfg.model.remat, one.cfg.mesh.pipeline != 1, one.estimate.exchange)
    scale = PRIOR_SCALE
    for other, report in sorted(tried, key=lambda pair: kind(pair[0]) == kind(one)):
        if report.peak_bytes is not None and other.estimate.activation_bytes:
            scale = MARGIN * max(0, report.peak_bytes - other.estimate.state_bytes) / other.estimate.activation_bytes
    return scale


def needs_as_much(one: Candidate, failed: Candidate) -> bool:
    """Returns True if a candidate has the changes of `failed`, except for equal or fewer microbatches."""
    parts = "train.num_microbatches"
    other_changes = lambda candidate: {name: value for name, value in candidate.changes.items() if name != parts}
    fewer = one.cfg.train.num_microbatches <= failed.cfg.train.num_microbatches
    return fewer and other_changes(one) == other_changes(failed)


def fitting(tried: Tried) -> Tried:
    """Returns the results that fit."""
    return [pair for pair in tried if pair[1].fits]


def ranked(tried: Tried) -> Tried:
    """Returns the results in order: first candidates that fit, by roofline time, then others by peak memory."""
    return sorted(tried, key=rank)


def rank(pair: tuple[Candidate, PreflightReport]) -> tuple[float, ...]:
    """Returns the sort key of a result: time (rounded to about 1%), time without overlap, memory."""
    _, report = pair
    if not report.fits:
        return (1, report.peak_bytes or math.inf)
    bounds = bounds_of(report)
    assert report.peak_bytes is not None, "a step fits only if its peak is known"
    return (0, bucket(bounds.at_least_s), bounds.serial_s, report.peak_bytes)


def bounds_of(report: PreflightReport) -> Roofline:
    """Returns the roofline of a step that fits."""
    assert report.roofline is not None, "a step that fits was compiled, and make_report gives it a roofline"
    return report.roofline


def winner(tried: Tried) -> tuple[Candidate, PreflightReport] | None:
    """Returns the best result that fits, or None."""
    return min(fitting(tried), key=rank, default=None)


def winner_lines(tried: Tried) -> list[str]:
    """Returns lines that compare the step time of the best, the next best and the unchanged config."""
    best, *others = fitting(ranked(tried))
    lines = [f"best: {best[0].label}: {breakdown_text(bounds_of(best[1]))}"]
    unchanged = [pair for pair in tried if not pair[0].changes and pair is not best]
    for one, report in [*(pair for pair in others[:1] if pair[0].changes), *unchanged]:
        name = f"next best: {one.label}" if one.changes else "the unchanged config"
        lines.append(f"{name}: {breakdown_text(bounds_of(report)) if report.fits else 'does not fit'}")
    return lines


def breakdown_text(line: Roofline) -> str:
    """Returns text such as 'at least 12 ms per step: matmuls 9 ms, bubble 1 ms, exposed communication 2 ms'."""
    parts = {"matmuls": line.compute_s, "bubble": line.bubble_s, "exposed communication": sum(line.exposed_s.values())}
    return f"at least {line.at_least_s * 1e3:.4g} ms per step: {parts_text(parts) or 'no counted work'}"


def parts_text(parts: dict[str, float]) -> str:
    """Returns text such as 'matmuls 9 ms, bubble 1 ms' for {part: seconds}. Parts of 0 are omitted."""
    return ", ".join(f"{name} {seconds * 1e3:.4g} ms" for name, seconds in parts.items() if seconds)


def bucket(seconds: float) -> int:
    """Returns the index of a time on a logarithmic grid. SAME_TIME is the ratio of neighbours."""
    return round(math.log(max(seconds, 1e-12)) / math.log(SAME_TIME))


def override_lines(changes: dict[str, Any]) -> list[str]:
    """Returns a flag such as '--config.mesh.tensor=2' per change, without spaces."""
    return [f"--config.{name}={setting_text(value)}" for name, value in changes.items()]


def setting_text(value: Any) -> str:
    """Returns a value in the syntax of the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(tuple(value)).replace(" ", "") if isinstance(value, (tuple, list)) else str(value)
