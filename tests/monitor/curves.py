"""Made-up metrics of runs, well and with one thing wrong: what the rules of the diagnosis are tuned and judged by.

A clean run falls by a power law, bends with its schedule, and has noise of three kinds: heavy-tailed from step to step
(Student's t, 5 degrees of freedom), slow waves, and neighbours that move together. A fault changes one column from one
record on. All of it follows from the seed.
"""

import dataclasses
import math

import numpy as np

NOISE = {"small batch": 0.06, "medium batch": 0.02, "large batch": 0.006}  # of the loss: its standard deviation
SCHEDULES = ("cosine", "wsd", "constant")
EVERY = 10  # steps between two records
LAYERS = 6
BYTES = 40 * 2**30


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of a clean run."""

    seed: int
    schedule: str = "cosine"
    batch: str = "medium batch"
    records: int = 600

    @property
    def total_steps(self) -> int:
        return self.records * EVERY

    @property
    def warmup_steps(self) -> int:
        return max(EVERY, self.total_steps // 50)


def rate(kind: Kind, step: float) -> float:
    """The learning rate."""
    if step < kind.warmup_steps:
        return 3e-4 * (step + 1) / kind.warmup_steps
    done = (step - kind.warmup_steps) / max(1, kind.total_steps - kind.warmup_steps)
    if kind.schedule == "cosine":
        return 3e-5 + 2.7e-4 * 0.5 * (1 + math.cos(math.pi * done))
    if kind.schedule == "wsd":
        return 3e-4 if done < 0.8 else 3e-4 * (1 - (done - 0.8) / 0.2) + 3e-5 * (done - 0.8) / 0.2
    return 3e-4


def noise(rng: np.random.Generator, n: int, size: float) -> np.ndarray:
    """Relative noise of a metric, with the given standard deviation in the main."""
    heavy = rng.standard_t(5, n) / math.sqrt(5 / 3)
    together = np.zeros(n)
    for i in range(1, n):
        together[i] = 0.9 * together[i - 1] + math.sqrt(1 - 0.81) * rng.normal()
    waves = np.sin(2 * np.pi * (np.arange(n) / rng.uniform(30, 90) + rng.uniform()))
    return size * (heavy + 0.4 * together + 0.3 * waves)


def clean(kind: Kind) -> list[dict]:
    """The records of a run that is well, one line of metrics.jsonl each."""
    rng = np.random.default_rng([kind.seed, SCHEDULES.index(kind.schedule), list(NOISE).index(kind.batch)])
    n, size = kind.records, NOISE[kind.batch]
    floor, gain, power = rng.uniform(1.6, 2.2), rng.uniform(7, 9), rng.uniform(0.25, 0.4)
    steps = np.arange(1, n + 1) * EVERY
    learnt = np.cumsum([rate(kind, step) for step in steps]) / 3e-4 * EVERY
    still = 0.06 * np.array(
        [rate(kind, step) / 3e-4 for step in steps]
    )  # what the rate keeps the loss above its course
    course = floor + gain * (1 + learnt / 20) ** -power + still
    loss = course * (1 + noise(rng, n, size))
    norms = (0.4 + 3 * (1 + learnt / 30) ** -0.8) * np.exp(0.15 * rng.standard_t(5, n))
    seconds = rng.uniform(0.3, 20) * np.exp(rng.normal(0, 0.02, n))
    seconds[rng.random(n) < 0.01] *= rng.uniform(1.5, 4)  # a save, another tenant
    wait = seconds * 0.003 * np.exp(rng.normal(0, 1, n))
    with_mfu, tokens = kind.seed % 2 == 0, 2**19
    memory = BYTES * (0.8 + 0.002 * rng.random(n))
    host = 3e9 * (1 + 0.05 * np.log1p(np.arange(n) / 20)) + 1e6 * np.arange(n)
    sources = {name: rng.uniform(0.7, 1.3) for name in ("web", "code", "books")}
    source_noise = {name: noise(rng, n, 1.7 * size) for name in sources}
    activations = np.exp(rng.normal(0, 0.7, LAYERS))
    logits, valid_noise = rng.uniform(5, 40, LAYERS), rng.normal(0, 0.002, n)
    records = []
    for i, step in enumerate(steps.tolist()):
        records.append(
            {"step": step, "loss": loss[i], "tokens_per_second": tokens / seconds[i] if i else None}
            | {"step_seconds": seconds[i] if i else None, "data_wait_seconds": wait[i] if i else None}
            | {"mfu": 0.4 * seconds.min() / seconds[i] if with_mfu and i else None}
            | {"learning_rate": rate(kind, step - 1), "grad_norm": norms[i], "tokens_seen": step * tokens}
            | {"batch_index": step - 1, "tokens_hash": f"{step:016x}", "skipped": 0, "skipped_total": 0}
            | {"host_bytes_in_use": float(host[i]), "device_bytes_in_use": float(memory[i])}
            | {"device_bytes_limit": BYTES, "train/loss_scale": 1.0}
            | {"course": course[i]}
            | {f"train/{name}/loss": course[i] * part * (1 + source_noise[name][i]) for name, part in sources.items()}
        )
        if i % 20 == 19:
            growth = 1 + 0.1 * i / n
            records.append(
                {"step": step}
                | {f"stats/activation_rms/{layer}": float(activations[layer] * growth) for layer in range(LAYERS)}
                | {f"stats/mlp_rms/{layer}": float(0.3 * activations[layer] * growth) for layer in range(LAYERS)}
                | {f"stats/attention_logit_max/{layer}": float(logits[layer] * growth) for layer in range(LAYERS)}
            )
            records.append({"step": step, "validation/loss": course[i] * (1.01 + valid_noise[i])})
    return records


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    name: str
    expected: tuple[str, ...]  # rules of which one is to say so
    strength: float
    change: object  # (record, records since it began, strength, rng) -> None; changes the record
    begins: float = 0.5  # part of the run
    lasts: int = 10**9  # records
    kind: dict = dataclasses.field(default_factory=dict)


def scaled(name, factor):
    """Multiplies a column."""

    def change(record, since, strength, rng):
        if record.get(name) is not None:
            record[name] *= factor(since, strength, rng)

    return change


def not_finite(record, since, strength, rng):
    if "loss" in record:
        record.update(loss=None, grad_norm=None, nonfinite=["loss", "grad_norm"])


def flat(record, since, strength, rng):
    if "loss" in record:
        record["loss"] = 10.4 * (1 + 0.005 * rng.normal())


def slowing(record, since, strength, rng):
    """The loss keeps its noise, and of the rest of its fall only a part."""
    if "loss" in record:
        held = record["course_then"]
        record["loss"] *= (held + strength * (record["course"] - held)) / record["course"]


def starved(record, since, strength, rng):
    if record.get("step_seconds"):
        computing = record["step_seconds"]
        record["step_seconds"] = computing / (1 - strength)
        record["data_wait_seconds"] = record["step_seconds"] - computing
        record["tokens_per_second"] *= 1 - strength
        if record["mfu"]:
            record["mfu"] *= 1 - strength


def slowed(record, since, strength, rng):
    if record.get("step_seconds"):
        record["step_seconds"] *= strength
        record["tokens_per_second"] /= strength
        if record["mfu"]:
            record["mfu"] /= strength


def creeping(record, since, strength, rng):
    if "host_bytes_in_use" in record:
        record["host_bytes_in_use"] += strength * since * 2**20


def skipped(record, since, strength, rng):
    if "loss" in record:
        record.update(skipped=1, skipped_total=int((since + 1) * strength))


def layers_set(name):
    def change(record, since, strength, rng):
        if f"{name}/3" in record:
            record[f"{name}/3"] = strength

    return change


def shut(record, since, strength, rng):
    if "stats/mlp_rms/3" in record:
        record["stats/mlp_rms/3"] = strength * record["stats/activation_rms/3"]


def worse_validation(record, since, strength, rng):
    if "validation/loss" in record:
        record["validation/loss"] *= 1 + strength * since / 20


def alternating(since, strength, rng):
    return 1 + strength * math.sin(2 * math.pi * since / 5 + 0.4)


heal = scaled("loss", lambda since, strength, rng: 1 + (strength - 1) * math.exp(-since / 5))
diverge = scaled("loss", lambda since, strength, rng: 1 + (strength - 1) * (1 - math.exp(-(since + 1) / 8)))
swing = scaled("loss", alternating)
explode = scaled("grad_norm", lambda since, strength, rng: strength)
jump = scaled("train/code/loss", lambda since, strength, rng: strength)
long = dict(records=1500, schedule="constant")
FAULTS = [
    *(Fault("spike that heals", ("spike",), s, heal) for s in (1.4, 1.7, 2.5, 4.0)),
    *(Fault("loss that rises and stays", ("divergence", "spike"), s, diverge) for s in (1.1, 1.3, 2.0)),
    *(Fault("NaN", ("nonfinite",), n, not_finite, lasts=n) for n in (1, 5)),
    Fault("flat from the start", ("flat_start",), 0, flat, begins=0.0),
    *(Fault("plateau", ("plateau",), s, slowing, begins=0.3, kind=long) for s in (0.0, 0.1, 0.5)),
    *(Fault("oscillation", ("oscillation", "spike"), s, swing) for s in (0.05, 0.15, 0.4)),
    *(Fault("gradient explosion", ("explosion",), s, explode, lasts=6) for s in (5.0, 20.0, 500.0)),
    *(Fault("steps skipped", ("skipped_steps",), s, skipped, lasts=8) for s in (1, 5)),
    *(Fault("layer dead", ("activations",), s, layers_set("stats/activation_rms")) for s in (0.02, 0.003)),
    *(Fault("layer huge", ("activations",), s, layers_set("stats/activation_rms")) for s in (60, 400)),
    *(Fault("branch of a layer dead", ("activations",), s, shut) for s in (0.01, 1e-4)),
    *(Fault("attention logits", ("attention_logits",), s, layers_set("stats/attention_logit_max")) for s in (400, 5e3)),
    *(Fault("data starvation", ("starvation",), s, starved) for s in (0.05, 0.15, 0.5)),
    *(Fault("slow steps", ("slow_step", "utilisation_drop"), s, slowed) for s in (1.5, 2.5, 6.0)),
    *(Fault("utilisation drop", ("utilisation_drop", "slow_step"), s, slowed) for s in (1.1, 1.35, 1.8)),
    *(Fault("memory creep", ("memory_creep",), s, creeping) for s in (2, 20, 100)),
    *(Fault("validation rises", ("overfitting",), s, worse_validation) for s in (0.002, 0.02)),
    *(Fault("a source's loss jumps", ("source_jump",), s, jump) for s in (1.15, 1.4, 2.0)),
]


def faulty(fault: Fault, seed: int, **kind) -> tuple[list[dict], int]:
    """(records, the step at which the fault begins)."""
    kind = Kind(seed, **(kind | fault.kind))
    records, rng = clean(kind), np.random.default_rng([seed, 1])
    first, since, begins, then = int(fault.begins * kind.records) * EVERY, -1, None, None
    for record in records:
        if record["step"] <= first:
            continue
        since += "loss" in record
        if since >= fault.lasts:
            break
        begins, then = begins or record["step"], then or record.get("course")
        record["course_then"] = then
        fault.change(record, since, fault.strength, rng)
    return [without_course(record) for record in records], begins


def without_course(record: dict) -> dict:
    """As a run would write it, which does not know its course."""
    return {name: value for name, value in record.items() if not name.startswith("course")}
