"""Work folders of runs that nobody trained, whose ends follow a known law."""

import dataclasses
import json
from typing import Any

import numpy as np
import tiny

from jaxscale import schema
from jaxscale.config import RunConfig
from jaxscale.core.optim.optimizer import optim_schedule
from jaxscale.program.budget import resolve_budget
from jaxscale.tools.planning.loss_law import Terms

LAW = Terms(E=1.5, A=12.0, B=30.0, alpha=0.35, beta=0.37)
WIDTHS, STEPS = (16, 32, 64), (200, 400, 800)
BITS_PER_NAT = 0.36


def config(width: int = 16, steps: int = 200, **overrides: Any) -> RunConfig:
    """The tiny run, of another size and length."""
    values = {
        "model.embed_dim": width,
        "model.mlp_dim": 2 * width,
        "train_tokens": f"{steps} steps",
        "optim.warmup_tokens": "5%",
        "monitor.log_every_steps": 2,
    }
    return tiny.config(values | {name.replace("__", "."): value for name, value in overrides.items()})


def end_of(cfg: RunConfig) -> float:
    """Nats per token that the law has for the end of this run."""
    return LAW.loss(cfg.model.num_params, resolve_budget(cfg, None).total_steps * cfg.tokens_per_step)


def write(folder: Any, cfg: RunConfig, *, noise: float = 0.0, seed: int = 0, until: int | None = None) -> Any:
    """A finished run's config.json and metrics.jsonl. until: the last step that it reached."""
    rng, budget = np.random.default_rng(seed), resolve_budget(cfg, None)
    end = end_of(cfg) * float(np.exp(noise * rng.normal()))
    schedule = optim_schedule(cfg.optim, **budget.schedule_steps)
    last = budget.total_steps if until is None else until
    steps = np.arange(2, last + 1, 2)
    rates, parts = np.asarray(schedule(steps - 1)), steps / budget.total_steps
    losses = end * (1 + 0.1 * (1 / np.sqrt(parts) - 1)) * np.exp(noise * rng.normal(size=len(steps)))
    rows = [
        {"step": int(step), "loss": float(loss), "learning_rate": float(rate)}
        for step, loss, rate in zip(steps, losses, rates)
    ]
    if last == budget.total_steps:
        rows.append({"step": last, "validation/loss": end, "validation/bits_per_byte": BITS_PER_NAT * end})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"config": schema.to_dict(cfg), "budget": dataclasses.asdict(budget), "ancestry": []})
    )
    write_rows(folder, rows)
    return folder


def write_rows(folder: Any, rows: list[dict[str, Any]]) -> None:
    """metrics.jsonl with these lines."""
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def rows_of(folder: Any) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_ladder(folder: Any, *, noise: float = 0.003, **overrides: Any) -> Any:
    """Nine runs: three sizes, three lengths."""
    for place, (width, steps) in enumerate((width, steps) for width in WIDTHS for steps in STEPS):
        write(folder / f"{width}-{steps}", config(width, steps, **overrides), noise=noise, seed=place)
    return folder
