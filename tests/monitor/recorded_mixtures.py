"""Small mixtures of experts, some of them made sick on purpose: what their metrics say of experts, as recorded.

    python tests/monitor/recorded_mixtures.py RUNS      # trains them, and writes recorded_mixtures.json.gz

Each is the tiny run of tests/tiny.py on the standard library's source, 256 tokens a step. A sick one differs by its
rate, or by the parameters that it begins with. Values are kept to four digits.
"""

import dataclasses
import gzip
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import tiny  # noqa: E402

from jaxscale.runtime.monitor.health import RunFacts, facts_from_config  # noqa: E402
from jaxscale.runtime.run.opening import open_run  # noqa: E402
from jaxscale.runtime.training import loop  # noqa: E402

FILE = pathlib.Path(__file__).parent / "recorded_mixtures.json.gz"
QUIET = {
    "monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 5, "eval.num_rows": 0,
    "monitor.statistics_every_steps": 0, "checkpoint.save_every_steps": 0,
}  # fmt: skip
TEXT = {"data.name": "stdlib", "optim.peak_lr": 3e-3, "optim.min_lr": 3e-4, "optim.warmup_tokens": "20 steps"}
EIGHT, SIXTEEN = dict(number=8, chosen=2, mlp_dim=16), dict(number=16, chosen=4, mlp_dim=16)
BALANCED = {"train.aux_losses": {"balance_loss": 1e-2}}


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A run. begins: what is done to the parameters of its experts before the first step, of layer 1."""

    experts: dict
    steps: int = 400
    more: dict = dataclasses.field(default_factory=dict)
    begins: object = None

    def config(self, **quiet):
        model = tiny.LLAMA | {"vocab_size": 272, "experts": self.experts}
        return tiny.config(QUIET | TEXT | {"train_tokens": f"{self.steps} steps", "model": model} | self.more | quiet)


def set_bias(experts, value):
    """Biases that, at a rate of 0, stay as they are."""
    return lambda mlp: mlp | {"router_bias": mlp["router_bias"].at[1, experts].set(value)}


FROZEN = EIGHT | {"bias": True, "bias_rate": 0.0}
HEALTHY = {
    "bias": Mixture(EIGHT | {"bias": True}, 1000),
    "bias, high rate": Mixture(EIGHT | {"bias": True}, 1000, {"optim.peak_lr": 1e-2, "seed": 2}),
    "bias, sigmoid": Mixture(SIXTEEN | {"bias": True, "score": "sigmoid"}, 1000),
    "balance loss": Mixture(EIGHT, 600, BALANCED),
    "balance loss, sixteen": Mixture(SIXTEEN, 600, BALANCED | {"seed": 2}),
}
SICK = {
    "one expert is never chosen": Mixture(FROZEN, 400, begins=set_bias([3], -10.0)),
    "two experts have all tokens": Mixture(FROZEN, 400, begins=set_bias([0, 1], 10.0)),
    "a router of nothing but large weights": Mixture(
        EIGHT, 400, begins=lambda mlp: mlp | {"router": mlp["router"].at[1].mul(100.0)}
    ),
    "a bias that moves by 1": Mixture(EIGHT | {"bias": True, "bias_rate": 1.0}, 100),
    "a bias that moves by a twentieth": Mixture(EIGHT | {"bias": True, "bias_rate": 0.05}, 300),
}
MIXTURES = HEALTHY | SICK


def train(mixture, folder, **quiet):
    """Trains it in this folder."""
    run = open_run(mixture.config(**quiet), str(folder), log=lambda text: None)
    if mixture.begins is not None:
        blocks = run.state.params["blocks"]
        params = run.state.params | {"blocks": blocks | {"mlp": mixture.begins(blocks["mlp"])}}
        run = dataclasses.replace(run, state=run.state._replace(params=params))
    loop.train(run)


def is_kept(name):
    return name in ("step", "loss", "learning_rate") or name.startswith(("train/expert", "train/router"))


def short(value):
    """Four digits of a float."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def recorded() -> dict[str, tuple[list[dict], RunFacts]]:
    """The records and facts of each run by its name."""
    kept = json.loads(gzip.decompress(FILE.read_bytes()))
    columns = lambda run: [dict(zip(run["names"], row)) for row in run["rows"]]
    whole = lambda rows: [{name: value for name, value in row.items() if value is not None} for row in rows]
    return {name: (whole(columns(run)), facts_from_config(run["config"])) for name, run in kept.items()}


def keep(folder: pathlib.Path, names) -> None:
    """Trains those of these names and writes the file, with what it has of others."""
    kept = json.loads(gzip.decompress(FILE.read_bytes())) if FILE.exists() else {}
    for name in names or MIXTURES:
        train(MIXTURES[name], folder / name)
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        records = [record for line in lines if "loss" in (record := json.loads(line))]
        columns = [column for column in records[-1] if is_kept(column)]
        rows = [[short(record.get(column)) for column in columns] for record in records]
        whole = json.loads((folder / name / "config.json").read_text())
        settings = {part: whole["config"][part] for part in ("model", "optim", "train")}
        kept[name] = {"config": {"config": settings, "budget": whole["budget"]}, "names": columns, "rows": rows}
        FILE.write_bytes(gzip.compress(json.dumps(kept, separators=(",", ":")).encode(), 9, mtime=0))
        print(f"{name}: {len(rows)} records; {FILE.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    keep(pathlib.Path(sys.argv[1]), sys.argv[2:])
