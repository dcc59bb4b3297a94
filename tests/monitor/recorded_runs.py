"""Ten clean runs of the quick start, ten of a small one, and four that were spoilt: their metrics, as recorded.

Made on 2026-11-22 on two cores of an x86_64 machine (jax 0.10.2), when the quick start was this (THEN):

    --config.batch_tokens=2048 --config.train_tokens=1_000_000 --config.train.num_microbatches=2
    --config.model.compute_dtype=float32 --config.optim.name=adamw --config.optim.peak_lr=2e-3
    --config.eval.every_steps=100

Those of the quick start, by

    python -m jaxscale.main --config=configs/quickstart.py --workdir=RUNS/quickstart0 --config.seed=0 THEN

with seeds 0 to 9: 0 and 3 on a quiet machine, 1 last in line on a busy one (1 and 3 hours before, by other code), the
others first in line; and "busy" with seed 1, no further in line than up to twelve other programs. The small ones on a
busy machine, which explains the times of their steps, by

    python -m jaxscale.main --config=configs/quickstart.py --workdir=RUNS/seed0 --config.seed=0 THEN
        --config.seq_len=128 --config.batch_tokens=1024 --config.train_tokens="200 steps"
        --config.train.num_microbatches=1
        --config.model.num_layers=2 --config.model.embed_dim=128 --config.model.num_heads=2
        --config.model.num_kv_heads=2 --config.model.mlp_dim=384 --config.monitor.log_every_steps=1
        --config.monitor.statistics_every_steps=5 --config.eval.every_steps=50 --config.eval.num_rows=32

with seeds 0 to 9, and with seed 0 and optim.peak_lr and min_lr of 1e-9 and 1e-10 ("flat"), of 0.3 ("hot"), and of 3
with a warmup of 100 steps ("hotter"). `python tests/monitor/recorded_runs.py RUNS` keeps the columns below and
what the rules read of LAYERS, to four digits, in recorded_runs.json.gz, in the place of runs of the same name there.
"""

import gzip
import json
import pathlib
import sys

from jaxscale.runtime.monitor.config import HealthConfig
from jaxscale.runtime.monitor.health import Finding, Health, RunFacts
from jaxscale.runtime.monitor.health.evidence import pair_with_events

FILE = pathlib.Path(__file__).parent / "recorded_runs.json.gz"
COLUMNS = ("step", "loss", "step_seconds", "data_wait_seconds", "learning_rate", "grad_norm", "skipped_total",
           "host_bytes_in_use", "host_peak_bytes", "validation/loss")  # fmt: skip
LAYERS = tuple(f"stats/{name}/" for name in ("activation_rms", "attention_rms", "mlp_rms", "attention_logit_max"))
QUICKSTART = tuple(f"quickstart{seed}" for seed in range(10))
SMALL = tuple(f"seed{seed}" for seed in range(10))
BUSY = "busy"


def runs() -> dict[str, list[dict]]:
    """The records of each run by its name, with what follows from the columns put back."""
    kept = json.loads(gzip.decompress(FILE.read_bytes()))
    tokens = {name: 2048 if is_quickstart(name) else 1024 for name in kept}
    return {
        name: [whole(dict(zip(COLUMNS, row)) | watched, tokens[name]) for *row, watched in rows]
        for name, rows in kept.items()
    }


def replay(records, events=(), cfg: HealthConfig | None = None, facts: RunFacts | None = None) -> list[Finding]:
    """All findings of a run. An event counts from the first record at or behind its place."""
    health = Health(cfg, facts or RunFacts())
    return [finding for record, due in pair_with_events(records, events) for finding in health.observe(record, due)]


def is_quickstart(name: str) -> bool:
    """False for the small ones."""
    return name in (*QUICKSTART, BUSY)


def whole(record: dict, tokens: int) -> dict:
    """A record as the run wrote it, but for the columns that were not kept. tokens: of a step."""
    if record["validation/loss"] is not None:
        return {"step": record["step"], "validation/loss": record["validation/loss"]}
    del record["validation/loss"]
    seconds = record["step_seconds"]
    more = {"tokens_per_second": tokens / seconds if seconds else None, "mfu": None, "batch_index": record["step"] - 1}
    return record | more | {"tokens_seen": record["step"] * tokens}


def every(records: list[dict], steps: int) -> list[dict]:
    """As if training metrics had been written every so many steps only."""
    return [record for record in records if "loss" not in record or record["step"] % steps == 0 or record["step"] == 1]


def short(value):
    """Four digits of a float."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def layers(record: dict) -> dict:
    """What a record says of layers: some do."""
    return {name: short(value) for name, value in record.items() if name.startswith(LAYERS)}


def keep(folder: pathlib.Path) -> None:
    """Writes the file with what the runs' folders hold."""
    kept = json.loads(gzip.decompress(FILE.read_bytes())) if FILE.exists() else {}
    for path in sorted(folder.glob("*/metrics.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        kept[path.parent.name] = [
            [*(short(record.get(name)) for name in COLUMNS), layers(record)] for record in records
        ]
    FILE.write_bytes(gzip.compress(json.dumps(kept, separators=(",", ":")).encode(), 9, mtime=0))
    print(f"{FILE}: {FILE.stat().st_size} bytes, {len(kept)} runs")


if __name__ == "__main__":
    keep(pathlib.Path(sys.argv[1]))
