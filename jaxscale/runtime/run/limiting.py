"""Conversion of the limits of a run (deadline and cost) to the TimeLimit of this process."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxscale.config import RunConfig
from jaxscale.core.optim.config import STABLE
from jaxscale.kernels.hardware import find_chip
from jaxscale.program.budget import decay_begin, decay_steps
from jaxscale.runtime.monitor.events import read_events
from jaxscale.runtime.monitor.goodput import measure_goodput, unix_time
from jaxscale.runtime.run.options import Log
from jaxscale.runtime.run.start import RunFolder, Start
from jaxscale.runtime.training.config import LimitConfig
from jaxscale.runtime.training.limits import TimeLimit
from jaxscale.runtime.training.loop_services import Services
from jaxscale.system.exits import BadInput
from jaxscale.units import or_list


def hourly_dollars(limit: LimitConfig, mesh: Mesh) -> float:
    """Returns the cost of an hour of all chips. Raises BadInput if no price is known."""
    kind = mesh.devices.flat[0].device_kind
    chip = find_chip(kind)
    price = limit.chip_hour_dollars or (chip.price.dollars_per_hour if chip and chip.price else None)
    if price is None:
        raise BadInput(
            f"limit.dollars={limit.dollars:g} needs a price, but the list price of {kind!r} is unknown; set the price "
            "of one chip hour with --config.limit.chip_hour_dollars=DOLLARS"
        )
    chips = mesh.size / (chip.devices_per_chip if chip else 1)
    return chips * price


def check_early_decay(cfg: RunConfig, start: Start) -> None:
    """Raises BadInput for limit.on_overrun='decay' while the batch size or sequence length still grows."""
    stages = start.remaining_stages
    if not cfg.limit.on or cfg.limit.on_overrun != "decay" or len(stages) == 1:
        return
    reason = "needs a constant batch size, but batches grow (batch_ramp)"
    if len({stage.tokens for stage in stages}) == 1:
        reason = "needs a constant sequence length to predict the time, but sequences grow (seq_len_ramp)"
    raise BadInput(
        f"limit.on_overrun='decay' {reason} until batch {stages[-1].first}; use limit.on_overrun='tell' until then"
    )


def make_limits(folder: RunFolder, start: Start, mesh: Mesh, services: Services, say: Log) -> TimeLimit | None:
    """Returns the limit of this process, or None. Call it after the start is recorded in events.jsonl."""
    cfg, budget = folder.cfg, start.budget
    if not cfg.limit.on:
        return None
    primary = jax.process_index() == 0
    ends_at, name = first_limit(folder.path, cfg.limit, mesh, services.clock()) if primary else (0.0, "")
    known = dict(seq_len=cfg.seq_len, batch_tokens=budget.batch_tokens, train_tokens=budget.train_tokens)
    known |= dict(epoch_tokens=start.corpus.epoch_tokens)
    decays = cfg.limit.on_overrun == "decay" and folder.replayed is None  # a replay makes no decisions
    return TimeLimit(
        ends_at=ends_at,
        name=name,
        total_steps=budget.total_steps,
        start_step=start.steps_done,
        warmup_steps=budget.warmup_steps,
        decay_steps=functools.partial(decay_steps, cfg.optim, **known) if decays else None,
        decay_start=decay_begin(cfg.optim, budget.total_steps, budget.decay_start),
        advice=overrun_advice(cfg),
        note=services.note,
        say=say,
        board=services.board,
        primary=primary,
        clock=services.clock,
    )


def overrun_advice(cfg: RunConfig) -> str:
    """Returns advice on how to end the run within its limit."""
    if cfg.optim.decay not in STABLE:
        return f"reduce train_tokens; a run with optim.decay={or_list(STABLE)} could decay early"
    if cfg.limit.on_overrun == "decay":
        return "the decay has started, and is not shortened"
    return "stop it and restart it with --config.limit.on_overrun=decay, or reduce train_tokens"


def first_limit(path: Any, limit: LimitConfig, mesh: Mesh, now: float) -> tuple[float, str]:
    """Returns (time of the earliest limit in seconds since 1970, its name)."""
    events, found = read_events(path), []
    began = next((began_at(event) for event in events if event["event"] == "started"), None)
    if limit.deadline is not None:
        found.append((limit.ends_at(now if began is None else began), f"limit.deadline={limit.deadline}"))
    if limit.dollars:
        seconds = limit.dollars / hourly_dollars(limit, mesh) * 3600
        found.append((now + seconds - paid_seconds(events, now), f"limit.dollars={limit.dollars:g}"))
    return min(found)


def paid_seconds(events: Sequence[dict[str, Any]], now: float) -> float:
    """Returns the seconds for which the run pays: all starts until now, without the time between them."""
    starts = [number for number, event in enumerate(events) if event["event"] in ("started", "resumed")]
    if not starts:
        return 0.0
    began = began_at(events[starts[-1]])
    first = next(number for number in starts if began_at(events[number]) == began)  # a rewind opens the run again
    before = measure_goodput((), events[: first + 1])  # the last event has the ledger of the previous start
    return before.wall_seconds - before.seconds["idle"] + now - began


def began_at(event: dict[str, Any]) -> float:
    """Returns when the process of a start began, in seconds since 1970."""
    return unix_time(event.get("process_began")) or unix_time(event.get("time")) or 0.0
