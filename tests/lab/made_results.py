"""Results of runs that nobody trained: their losses follow a law that the test knows."""

import zlib

import numpy as np

from jaxscale.runtime.monitor.history import History
from jaxscale.tools.lab.trial import Base, Result

BASE = Base.load("configs/lab.py", {})


def made(trial, loss, *, curve=None, diverged=False, metrics=None, events=()):
    """A Result that ends with this loss. curve: training losses, one a step; metrics: others, by name."""
    curve = [loss] * 40 if curve is None else list(curve)
    tokens = int(trial.overrides.get("batch_tokens", BASE.cfg.tokens_per_step))
    rows = [
        {"step": n + 1, "tokens_seen": (n + 1) * tokens, "loss": float(value), "step_seconds": 0.01}
        | {name: float(values[n]) for name, values in (metrics or {}).items()}
        for n, value in enumerate(curve)
    ]
    rows.append({"step": len(curve), "validation/loss": loss})
    history = History(workdir=f"runs/{trial.name}", rows=tuple(rows), events=tuple(events))
    return Result(trial, f"runs/{trial.name}", diverged, float("nan") if diverged else loss, history, 0.01 * len(curve))


def noisy(trial, size=0.002):
    """A number about 0, the same for the same trial, whatever settings there are besides."""
    return size * float(np.random.default_rng(zlib.crc32(trial.label.encode())).normal())
