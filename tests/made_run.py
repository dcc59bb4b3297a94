"""A work folder as a run of some thousand steps on TPUs would leave it, made by arithmetic: for the report's tests."""

import datetime
import json
import math
import os
import random

BEGAN = datetime.datetime(2026, 11, 3, 8, 0, tzinfo=datetime.UTC).timestamp()
STEP_SECONDS, BATCH_TOKENS, TOTAL_STEPS = 1.9, 2_097_152, 6000
SHARES = {"web": 0.82, "code": 0.12, "math": 0.06}
LATER = {"web": 0.5, "code": 0.3, "math": 0.2}
SPIKE, REWIND_TO = 2310, 2200
CANARY = "</script><img src=x onerror=document.title='OWNED'>\x1b[31mred\x1b[0m\u202egnp.exe & \"quoted\" \u2028end"


def loss_at(step, rng, floor=1.85):
    """Nats per token of a training step."""
    return floor + 9.0 * (step + 12) ** -0.35 * math.exp(-step / 9000) + rng.gauss(0, 0.02)


def training_row(step, rng, layers=16, peak_lr=3e-4, floor=1.85, restarts=True):
    """A training line of metrics.jsonl."""
    loss = loss_at(step, rng, floor)
    slow = 1.6 if rng.random() < 0.006 else 1.0
    seconds = STEP_SECONDS * slow * (1 + 0.01 * rng.gauss(0, 1))
    warm = min(step / 200, 1.0)
    row = {
        "step": step,
        "loss": loss,
        "tokens_per_second": BATCH_TOKENS / seconds,
        "step_seconds": seconds,
        "data_wait_seconds": 0.004 + 0.5 * (slow - 1) + 0.002 * rng.random(),
        "mfu": 0.47 / slow * (1 + 0.008 * rng.gauss(0, 1)),
        "learning_rate": peak_lr * warm * (0.1 + 0.9 * (1 + math.cos(math.pi * step / TOTAL_STEPS)) / 2),
        "grad_norm": (0.32 + 4 * math.exp(-step / 60)) * math.exp(rng.gauss(0, 0.18)),
        "tokens_seen": step * BATCH_TOKENS,
        "batch_index": step - 1,
        "tokens_hash": f"{step:016x}",
        "skipped": 0,
        "skipped_total": 0,
        "host_peak_bytes": 21_474_836_480 + 1_000_000 * step,
        "device_peak_bytes": 81_604_378_624,
        "device_bytes_limit": 102_005_473_280,
        "train/real_tokens": BATCH_TOKENS * 0.996,
    }
    row |= {f"train/{name}/loss": loss + shift for name, shift in (("web", 0.08), ("code", -0.6), ("math", -0.2))}
    row |= {f"goodput/{name}": value for name, value in ledger_at(step, restarts).items()} | {"goodput/fraction": 0.93}
    if step % 50 == 0:
        for layer in range(layers):
            hot = 2.5 if layer == 11 and 2200 < step < 2700 else 1.0
            row[f"stats/activation_rms/{layer}"] = (
                hot * (0.4 + 0.25 * layer) * (1 + step / 9000) * math.exp(rng.gauss(0, 0.05))
            )
        for group, size in (("embed", 0.002), ("attention", 0.001), ("mlp", 0.0012)):
            row[f"stats/update_ratio/{group}"] = size * warm * math.exp(rng.gauss(0, 0.06))
    return row


def ledger_at(step, restarts=True):
    """Seconds by kind since the start that a step belongs to."""
    wall = max(step - (2840 if restarts and step > 2830 else 0), 1) * STEP_SECONDS * 1.06
    parts = {"step": 0.93, "compile": 0.004, "data": 0.011, "save": 0.014, "eval": 0.02, "statistics": 0.01}
    parts |= {"restore": 0.001, "lost": 0.006, "other": 0.004}
    return {f"{kind}_seconds": round(wall * part, 1) for kind, part in parts.items()} | {"wall_seconds": round(wall, 1)}


def validation_row(step, rng, restarts=True):
    """A validation line."""
    loss = loss_at(step, rng) + 0.03
    bits = {"web": 0.98, "code": 0.62, "math": 0.81}
    row = {"step": step, "validation/loss": loss, "validation/bits_per_byte": loss / 2.6}
    row |= {f"validation/{name}/bits_per_byte": loss / 2.6 * part for name, part in bits.items()}
    row |= {f"goodput/{name}": value for name, value in ledger_at(step, restarts).items()} | {"goodput/fraction": 0.93}
    return row | {"validation_seconds": 14.2}


def event(at_step, name, number, /, seconds=None, **facts):
    """A line of events.jsonl."""
    when = datetime.datetime.fromtimestamp(
        BEGAN + (at_step * STEP_SECONDS * 1.06 if seconds is None else seconds), datetime.UTC
    )
    return {"time": when.isoformat(timespec="milliseconds"), "event": name, "step": number, **facts}


def written_at(step):
    """When the line of a step was written, in Unix seconds."""
    return BEGAN + step * STEP_SECONDS * 1.06


def config_of(peak_lr, changes):
    """config.json."""
    return {
        "config": {
            "model": {"name": "llama", "num_layers": 16, "embed_dim": 2048, "num_heads": 16, "vocab_size": 32_768},
            "seq_len": 4096,
            "batch_tokens": BATCH_TOKENS,
            "optim": {"name": "adamw", "peak_lr": peak_lr, "warmup_tokens": "200 steps", "clip_norm": 1.0},
            "data": {"name": "shards", "packing": "best_fit",
                     "mixture": {"0": SHARES, "2000 steps": LATER}, "max_epochs": {"math": 4.0},
                     "objective": {"name": "next_token"}, "skip_batches": []},
            "checkpoint": {"save_every_steps": 500, "keep_last": 3},
        },
        "budget": {"batch_tokens": BATCH_TOKENS, "train_tokens": TOTAL_STEPS * BATCH_TOKENS, "total_steps": TOTAL_STEPS,
                   "warmup_steps": 200},
        "devices": {"kind": "TPU v5", "number": 64},
        "mixture": {
            "stages": [[0, {"web": 840, "code": 123, "math": 61}], [1_024_000, {"web": 512, "code": 307, "math": 205}]],
            "rows": {"web": 9_000_000, "code": 1_400_000, "math": 80_000},
        },
        "peak": {"name": "TPU v5p", "source": "cloud.google.com/tpu/docs"},
        "ancestry": [],
        "versions": {"python": "3.12.1", "jax": "0.10.2", "flax": "0.12.0", "optax": "0.2.8"},
        "git_commit": "3e798144d1df3cdeae38c433257b1e8354d377ea",
        "changed": changes,
    }  # fmt: skip


def events_of(last):
    """What happened up to a step: a spike that a rewind answered, a machine that was taken away, saves."""
    devices = {"kind": "TPU v5", "number": 64}
    save = lambda step: event(step, "saved", step, seconds=None, bytes=14_800_000_000, verified=True, health="clean")
    found = [event(0, "started", 0, changed=[], devices=devices)]
    found += [save(step) for step in range(500, 2001, 500)]
    found += [
        event(SPIKE, "spike", SPIKE, what="spike", loss=7.9, grad_norm=41.0, batch=SPIKE - 1),
        event(SPIKE + 4, "skipped", SPIKE + 3, why="loss by median", loss=8.2, grad_norm=63.0, batch=SPIKE + 2),
        event(SPIKE + 5, "skipped", SPIKE + 4, why="loss by median", loss=8.4, grad_norm=71.0, batch=SPIKE + 3),
        event(SPIKE + 31, "rewind", SPIKE + 30, to=REWIND_TO, why="skipped", skip_batches=[[2300, 2335]], batch=2199),
        event(SPIKE + 60, "resumed", REWIND_TO, changed=[], devices=devices),
        save(2500),
        event(2830, "stopped", None, code=10, why="stopped (preempted, exit 10): SIGTERM: saved step 2830",
              goodput=ledger_at(2830)),
        event(2840, "resumed", 2830, changed=[{"name": "optim.peak_lr", "old": 3e-4, "new": 2.5e-4}], devices=devices),
        event(3100, "alert", 3100, what="data_starvation", over=False,
              seen="data wait is 31% of the step over 50 reports",
              causes=[{"what": "a slow disk or network", "evidence": "0.6 s at the median, 0.004 s before"}],
              advice=["look at the data's storage", "raise data.workers"]),
        event(3170, "alert", 3170, what="data_starvation", over=True, seen="data wait is 0.2% of the step"),
    ]  # fmt: skip
    found += [save(step) for step in range(3000, last + 1, 500)]
    return found


def make_run(folder, last=4200, seed=0, every=10, peak_lr=3e-4, floor=1.85, plain=False):
    """Writes the folder. plain: nothing happens in it, and nothing beyond metrics, events and config is there."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows, abandoned = [validation_row(0, rng), training_row(1, rng, floor=floor)], []
    for step in range(every, last + 1, every):
        row = training_row(step, rng, peak_lr=peak_lr, floor=floor, restarts=not plain)
        if not plain and 2660 < step < 2700:
            row |= {"grad_norm": 30.0, "skipped": 1}
        if not plain and 3050 < step <= 3150:
            row |= {"data_wait_seconds": 0.6, "mfu": row["mfu"] * 0.7}
        rows.append(row)
        if step % 500 == 0:
            rows.append(validation_row(step, rng, restarts=not plain))
    changes = [] if plain else [{"step": 2830, "name": "optim.peak_lr", "old": 3e-4, "new": 2.5e-4}]
    events = [one for one in events_of(last) if (one["step"] or 0) <= last]
    if plain:
        events = [one for one in events if one["event"] in ("started", "saved")]
    else:
        for step in range(REWIND_TO + every, SPIKE + 31, every):
            row = training_row(step, rng)
            row["loss"] += max(0, step - SPIKE + 20) ** 0.5
            row["grad_norm"] *= 1 + max(0, step - SPIKE + 20)
            abandoned.append({"rewind": 1} | row)
        tokens = [BATCH_TOKENS * step for step in range(400, TOTAL_STEPS + 1, 200)]
        middle = [loss_at(t / BATCH_TOKENS, random.Random(0)) for t in tokens]
        curve = {
            "tokens": tokens,
            "low": [x - 0.08 for x in middle],
            "middle": middle,
            "high": [x + 0.1 for x in middle],
        }
        (folder / "forecast.json").write_text(json.dumps(curve | {"made_from": ["runs/60m", "runs/150m"]}))
        samples = [(2000, "The sea is a wide and a quiet place, and the ships that"), (4000, CANARY)]
        lines = (json.dumps({"step": step, "text": text}) for step, text in samples)
        (folder / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines))
        ends = [
            {"time": "2026-11-03T09:35:20.000+00:00", "event": "end", "number": 1, "code": 10, "seconds": 5720.4,
             "meaning": "exit 10, saved and exited on a signal", "step": 2830, "steps_won": 2830, "steps_lost": 0},
            {"time": "2026-11-03T10:20:00.000+00:00", "event": "end", "number": 2, "code": -9, "seconds": 2610.0,
             "meaning": "killed by SIGKILL", "step": 4000, "steps_won": 1170, "steps_lost": 60},
        ]  # fmt: skip
        (folder / "supervise.jsonl").write_text("".join(f"{json.dumps(end)}\n" for end in ends))
    for name, records in (("metrics", rows), ("events", events), ("abandoned", abandoned)):
        if records:
            (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (folder / "config.json").write_text(json.dumps(config_of(peak_lr, changes)))
    for path in folder.iterdir():
        os.utime(path, (written_at(last), written_at(last)))
    return folder
