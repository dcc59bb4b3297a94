"""Metrics of the loop: training metrics, read one step late, and validation."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxscale.data.batch import Batch, hash_text
from jaxscale.monitor.machine import HostLoad, memory_metrics
from jaxscale.monitor.throughput import Throughput
from jaxscale.monitor.writers import Writer
from jaxscale.system.exits import Exit, Stop
from jaxscale.training.expert_use import ExpertUse

INTERNAL = ("skipped_in_row", "verdict", "loss_median")  # read by the autopilot


class Unread(NamedTuple):
    """A dispatched step, whose metrics have not been read yet."""

    step: int
    metrics: dict[str, jax.Array]
    batch: Batch
    batch_index: int
    waited: float  # seconds for its data
    compiles: bool  # whether it is the first of this start with a batch of its size
    statistics: Mapping[str, float] = {}  # of it, if they were due


class Reporter(NamedTuple):
    """Writes metrics, and keeps their running totals."""

    writer: Writer
    throughput: Throughput
    tokens_after: Callable[[int], int]  # step -> tokens of all batches up to it
    source_names: Sequence[str]  # of the mixture, as the step numbers them
    sums: Counter[str]  # over the steps since this start; those before it are not in them
    load: HostLoad
    experts: ExpertUse | None = None  # of a mixture

    def report(self, unread: Unread) -> dict[str, Any]:
        """The metrics of a step, fetched, added to the sums, and written if they are due."""
        step = unread.step
        fetched = jax.device_get(unread.metrics)
        seen = hash_text(fetched.pop("tokens_seen"))
        sources = source_losses(self.source_names, fetched)
        if self.experts is not None:
            sources |= self.experts.take(fetched)
            if self.experts.due(step):
                self.writer.experts(step, self.experts.record())
        scalars = {name: value.item() for name, value in fetched.items()}
        values = dict(scalars)
        self.sums["gated_rows"] += values.get("gated_rows", 0)
        tokens = self.tokens_after(step)
        trained, row_tokens = tokens - self.tokens_after(step - 1), unread.batch.tokens.shape[1]
        self.throughput.add(trained, unread.waited, excluded=unread.compiles, row_tokens=row_tokens)
        self.writer.tick(step)
        if not self.writer.due(step) and not unread.statistics:
            return scalars
        if not values["real_tokens"]:  # means over no token
            values |= {"loss": None, "grad_norm": None}
        record = {
            "loss": values.pop("loss"),
            **self.throughput.report(),
            "learning_rate": values.pop("lr"),
            "grad_norm": values.pop("grad_norm"),
            "tokens_seen": tokens,
            "batch_index": unread.batch_index,
            "tokens_hash": seen,  # of the global batch, as the devices had it
            "skipped": int(values.pop("skipped")),
            "skipped_total": values.pop("skipped_total"),
            **memory_metrics([device.memory_stats() for device in jax.local_devices()]),
            **self.load.metrics(),
        }
        if "gated_rows" in values:
            record["gated_rows"] = values.pop("gated_rows")
            record["gated_rows_total"] = self.sums["gated_rows"]
        others = {name: value for name, value in values.items() if name not in INTERNAL}
        record |= {f"train/{name}": value for name, value in (others | sources).items()}
        self.writer.write(step, {**record, **unread.statistics})
        return scalars

    def validation(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Writes held-out losses; the time does not count as training. Raises Stop if the loss is not finite."""
        self.writer.write(step, metrics | {"validation_seconds": seconds})
        self.throughput.exclude(seconds)
        if not math.isfinite(metrics.get("validation/loss", 0.0)):
            raise Stop(
                Exit.NON_FINITE,
                f"the validation loss at step {step} is {metrics['validation/loss']}: a model that computes this "
                "cannot be saved; lower optim.peak_lr, or set model.embed_compute_dtype=float32",
            )

    def evaluation(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Writes what the named evaluators found; the time does not count as training."""
        self.writer.write(step, metrics | {"evals_seconds": seconds})
        self.throughput.exclude(seconds)


def source_losses(names: Sequence[str], fetched: dict[str, Any]) -> dict[str, float]:
    """{'NAME/loss': nats per token} of each source that the step had tokens of; taken out of `fetched`."""
    if "source_nats" not in fetched:
        return {}
    sums = zip(names, fetched.pop("source_nats").tolist(), fetched.pop("source_tokens").tolist())
    return {f"{name}/loss": nats / tokens for name, nats, tokens in sums if tokens}


def seconds_since(began: float) -> float:
    """Seconds of the monotonic clock."""
    return time.monotonic() - began
