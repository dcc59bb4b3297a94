"""Metrics of the training loop: training metrics, which are read one step late, and validation metrics."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxscale.core.batch import Batch
from jaxscale.runtime.data.stacking import format_hash
from jaxscale.runtime.monitor.goodput import Throughput
from jaxscale.runtime.monitor.machine import HostLoad, memory_metrics
from jaxscale.runtime.monitor.writers import Writer
from jaxscale.runtime.training.expert_load import ExpertLoad
from jaxscale.system.exits import Exit, Stop

INTERNAL = ("skipped_in_row", "verdict", "loss_median")  # used by the autopilot, but not written


class DispatchedStep(NamedTuple):
    """A dispatched step whose metrics have not been read."""

    step: int
    metrics: dict[str, jax.Array]
    batch: Batch
    batch_index: int
    data_seconds: float  # seconds waited for the batch
    compiles: bool  # True for the first step of this process with this batch shape
    statistics: Mapping[str, float] = {}


class Reporter(NamedTuple):
    """Writes metrics and accumulates their totals."""

    writer: Writer
    throughput: Throughput
    tokens_after: Callable[[int], int]  # step -> tokens in all batches up to this step
    source_names: Sequence[str]  # sources of the mixture, in the order of the step's arrays
    sums: Counter[str]  # sums over the steps of this process
    load: HostLoad
    experts: ExpertLoad | None = None  # for an MoE model

    def report(self, pending: DispatchedStep) -> dict[str, Any]:
        """Fetches the metrics of a step, updates the totals, and writes the metrics if they are due."""
        step = pending.step
        fetched = jax.device_get(pending.metrics)
        tokens_hash = format_hash(fetched.pop("tokens_seen"))
        extra = source_losses(self.source_names, fetched)
        if self.experts is not None:
            extra |= self.experts.add_step(fetched)
            if self.experts.record_due(step):
                self.writer.experts(step, self.experts.record())
        scalars = {name: value.item() for name, value in fetched.items()}
        values = dict(scalars)
        self.sums["gated_rows"] += values.get("gated_rows", 0)
        tokens = self.tokens_after(step)
        step_tokens, row_tokens = tokens - self.tokens_after(step - 1), pending.batch.tokens.shape[1]
        self.throughput.add(step_tokens, pending.data_seconds, excluded=pending.compiles, row_tokens=row_tokens)
        self.writer.tick(step)
        if not self.writer.due(step) and not pending.statistics:
            return scalars
        if not values["real_tokens"]:  # a mean over zero tokens is undefined
            values |= {"loss": None, "grad_norm": None}
        record = {
            "loss": values.pop("loss"),
            **self.throughput.report(),
            "learning_rate": values.pop("lr"),
            "grad_norm": values.pop("grad_norm"),
            "tokens_seen": tokens,
            "batch_index": pending.batch_index,
            "tokens_hash": tokens_hash,  # hash of the global batch, computed on the devices
            "skipped": int(values.pop("skipped")),
            "skipped_total": values.pop("skipped_total"),
            **memory_metrics([device.memory_stats() for device in jax.local_devices()]),
            **self.load.metrics(),
        }
        if "gated_rows" in values:
            record["gated_rows"] = values.pop("gated_rows")
            record["gated_rows_total"] = self.sums["gated_rows"]
        others = {name: value for name, value in values.items() if name not in INTERNAL}
        record |= {f"train/{name}": value for name, value in (others | extra).items()}
        self.writer.write(step, {**record, **pending.statistics})
        return scalars

    def validation(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Writes validation metrics. Throughput excludes their time. Raises Stop if the loss is not finite."""
        self.writer.write(step, metrics | {"validation_seconds": seconds})
        self.throughput.exclude(seconds)
        if not math.isfinite(metrics.get("validation/loss", 0.0)):
            raise Stop(
                Exit.NON_FINITE,
                f"the validation loss at step {step} is {metrics['validation/loss']}, so the model was not "
                "saved; lower optim.peak_lr, or set model.embed_compute_dtype=float32",
            )

    def evaluation(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Writes metrics of the named evaluators; excludes the time from throughput."""
        self.writer.write(step, metrics | {"evals_seconds": seconds})
        self.throughput.exclude(seconds)


def source_losses(names: Sequence[str], fetched: dict[str, Any]) -> dict[str, float]:
    """Removes per-source sums from `fetched`, and returns {'NAME/loss': nats per token} for sources with tokens."""
    if "source_nats" not in fetched:
        return {}
    sums = zip(names, fetched.pop("source_nats").tolist(), fetched.pop("source_tokens").tolist())
    return {f"{name}/loss": nats / tokens for name, nats, tokens in sums if tokens}


def seconds_since(began: float) -> float:
    """Returns the seconds since `began` on the monotonic clock."""
    return time.monotonic() - began
