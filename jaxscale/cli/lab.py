"""Answers a question about a recipe with small runs. Prints a verdict with error bars and writes a page.

  jaxscale lab rate                                        how the best learning rate depends on the batch size
  jaxscale lab optimizers --config=configs/quickstart.py --seeds=5
  jaxscale lab vary --vary=optim.peak_lr=1e-3,2e-3 --vary=model.num_layers=2,4 --seeds=3

Experiments consist of ordinary runs in separate folders. All experiments share finished runs, and interrupted runs
resume. A run that diverges is a valid result. The page is WORKDIR/EXPERIMENT.html; docs/lab.md shows examples.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence

from jaxscale.cli.shrink import as_overrides, shrink, with_scaled_training
from jaxscale.settings.command_line import Arguments, flag, number_flag
from jaxscale.settings.config_file import config_name
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, put
from jaxscale.tools.lab import running
from jaxscale.tools.lab.experiment import Options
from jaxscale.tools.lab.experiment_page import capital, lab_page
from jaxscale.tools.lab.experiments import EXPERIMENTS
from jaxscale.tools.lab.trial import Base, Result, Trial, distinct

DEFAULT = "lab"


class DryRunEnd(Exception):
    """Ends an experiment under --dry_run, after the commands of its pending runs are printed."""


def numbers(kind: type):
    """Returns a reader for a flag with comma-separated positive numbers."""

    def read(name: str, text: str) -> tuple:
        with contextlib.suppress(ValueError):
            found = tuple(kind(part.replace("_", "")) for part in text.split(","))
            if all(0 < number < math.inf for number in found):
                return tuple(dict.fromkeys(found))
        raise BadInput(f"--{name}={text} must be positive numbers separated by commas, such as 1,2,4")

    return read


def read_vary(texts: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns the settings of --vary. Raises BadInput for a setting that has no values or occurs twice."""
    found = []
    for text in texts:
        name, _, values = text.partition("=")
        if not name or not all(values.split(",")):
            raise BadInput(f"--vary={text} must be NAME=VALUE,VALUE, such as --vary=optim.peak_lr=1e-3,2e-3")
        found.append((name.removeprefix("config."), tuple(values.split(","))))
    if len({name for name, _ in found}) < len(found):
        raise BadInput("--vary has the same setting twice; list all its values in one --vary")
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class LabFlags:
    config: str = flag(DEFAULT, "config of the run to vary", "FILE")
    settings: dict[str, str] = flag(dict, "sets any setting, in all runs", "VALUE", name="config.NAME")
    small: bool = flag(
        False, "reduces the run to a narrow model with two layers and short sequences, and prints the changes"
    )
    layers: int | None = flag(None, "maximum number of layers, with the same tokens per parameter", "N", least=1)
    workdir: str | None = flag(None, "folder of runs and pages; default runs/lab-<config>", "FOLDER")
    seeds: int = flag(0, "seeds per setting; 0: the experiment's default", least=0)
    rates: tuple[float, ...] = flag(
        (), "rate, batch, optimizers, clipping, width, shape: learning rates", "1e-3,2e-3", read=numbers(float)
    )
    batches: tuple[int, ...] = flag((), "rate, batch: tokens per step", "1024,4096", read=numbers(int))
    sizes: tuple[float, ...] = flag(
        (), "isoflop, ladder, width: widths; shape: layers; as multiples of the config", "0.5,1,2", read=numbers(float)
    )
    target: float = flag(
        0.0,
        "ladder: also trains a model with this multiple of the largest rung's parameters",
        "10",
        read=number_flag(lambda found: found > 1, "one number above 1, such as 10"),
    )
    names: tuple[str, ...] = flag(
        (),
        "rate, optimizers: optimizers; precision: formats",
        "adamw,lion",
        read=lambda _, text: tuple(dict.fromkeys(text.split(","))),
    )
    vary: tuple[str, ...] = flag((), "vary: a setting and its values; runs all combinations", "NAME=VALUE,VALUE")
    jobs: int = flag(0, "parallel runs; 0: one per core, on CPUs", least=0)
    dry_run: bool = flag(False, "prints one command per pending run, for Slurm, GKE or TPU VMs, and exits")


SUBVERBS = {name: tuple(field.name for field in dataclasses.fields(LabFlags)) for name in EXPERIMENTS}


@command(LabFlags, subverbs=SUBVERBS)
def main(arguments: Arguments) -> None:
    """Runs the experiment."""
    flags, name = arguments.flags, arguments.subverb
    check_flags(flags, name)
    base = base_of(arguments)
    data = base.cfg.data
    if not base.cfg.eval.num_rows:  # without a held-out loss, each run would be treated as diverged
        raise BadInput("eval.num_rows=0, but the lab compares held-out losses; set --config.eval.num_rows=64")
    if not (data.val_fraction or data.val_files or data.name == "synthetic"):
        raise BadInput("no data is held out, but the lab compares held-out losses; set --config.data.val_fraction=0.01")
    work = paths.as_path(flags.workdir or f"runs/lab-{config_name(flags.config)}")
    how = (flags.seeds, flags.rates, flags.batches, flags.sizes, flags.target, flags.names)
    options = Options(*how, read_vary(flags.vary))
    jobs = flags.jobs or running.default_jobs(os.environ.get("JAX_PLATFORMS"))
    seen: dict[str, Result] = {}

    def run(trials: Sequence[Trial]) -> list[Result]:
        unique = distinct(trials)
        if flags.dry_run and (lines := running.command_lines(unique, work)):
            put(*lines)
            raise DryRunEnd
        results = {r.trial.digest: r for r in running.run_all(unique, work, jobs=jobs, say=put)}
        seen.update(results)
        return [results[trial.digest]._replace(trial=trial) for trial in trials]

    experiment = EXPERIMENTS[name]
    try:
        found = experiment.answer(base, options, run)
    except DryRunEnd:
        return
    put("", experiment.question, *(f"  {capital(line)}" for line in found.verdict))
    page = work / f"{name}.html"
    paths.write_text_atomic(page, lab_page(name, experiment, base, list(seen.values()), found))
    put(page.absolute().as_uri() if not paths.is_remote(str(page)) else str(page))


def base_of(arguments: Arguments) -> Base:
    """Returns the config, reduced by --small and --layers except for overridden settings. Prints the changes."""
    flags, overrides = arguments.flags, arguments.overrides
    base = Base.load(flags.config, overrides)
    if not flags.small and flags.layers is None:
        return base
    cut = as_overrides(base.cfg, shrink(base.cfg, layers=flags.layers, small=flags.small, keep=overrides))
    smaller = Base.load(flags.config, {**cut, **overrides}).cfg
    cfg = with_scaled_training(Base.load(flags.config, {}).cfg, smaller, overrides)
    changed = {name: value for name, value in as_overrides(base.cfg, cfg).items() if name not in overrides}
    if not flags.dry_run:  # the printed commands include all settings
        put("changed for a small model:", *(f"  {name}: {value}" for name, value in changed.items()))
    return Base.load(flags.config, {**changed, **overrides})


def check_flags(flags: LabFlags, name: str) -> None:
    """Raises BadInput for a flag that the experiment does not use."""
    read_by = {
        "rates": ("rate", "batch", "optimizers", "clipping", "width", "shape"), "batches": ("rate", "batch"),
        "sizes": ("isoflop", "ladder", "shape", "width"), "target": ("ladder",),
        "names": ("rate", "optimizers", "precision"), "vary": ("vary",),
    }  # fmt: skip
    for flag_name, experiments in read_by.items():
        if getattr(flags, flag_name) and name not in experiments:
            raise BadInput(
                f"--{flag_name} applies only to jaxscale lab {', '.join(experiments)}; remove it from lab {name}"
            )
    if flags.seeds and name == "resume":
        raise BadInput("lab resume uses only one seed; remove --seeds")
