"""Answers a question about a recipe by small runs of it, with error bars and a page.

  jaxscale lab rate                                        how the best learning rate goes with the batch
  jaxscale lab optimizers --config=configs/quickstart.py --seeds=5
  jaxscale lab vary --vary=optim.peak_lr=1e-3,2e-3 --vary=model.num_layers=2,4 --seeds=3

Experiments are of ordinary runs, each in a folder of its own: a run that is done is not made again, whichever
experiment asks for it, and one that was interrupted goes on. A run that diverges is a result. The page is
WORKDIR/EXPERIMENT.html; docs/lab.md shows some.
"""

import dataclasses
import math
import os
from collections.abc import Sequence

from jaxscale.cli import run_verb
from jaxscale.cli.shrink import as_overrides, shrink, with_its_training
from jaxscale.command_line import Arguments, flag
from jaxscale.config import RunConfig
from jaxscale.config_file import config_name
from jaxscale.help_text import command
from jaxscale.lab import running
from jaxscale.lab.experiment import Options
from jaxscale.lab.experiments import EXPERIMENTS
from jaxscale.lab.page import capital, lab_page
from jaxscale.lab.trial import Base, Result, Trial, distinct
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, put

DEFAULT = "configs/lab.py"


class Planned(Exception):
    """--dry_run: commands were printed, and the runs that they make are what comes next."""


def numbers(kind: type):
    """A flag's reader of numbers above 0, with commas."""

    def read(name: str, text: str) -> tuple:
        try:
            found = tuple(kind(part.replace("_", "")) for part in text.split(","))
        except ValueError:
            found = ()
        if not found or not all(0 < number < math.inf for number in found):
            raise BadInput(f"--{name}={text} must be numbers above 0 with commas, such as 1,2,4")
        return tuple(dict.fromkeys(found))

    return read


def times_above_1(name: str, text: str) -> float:
    """A flag's number above 1. Raises BadInput for anything else."""
    (found,) = numbers(float)(name, text)[:1]
    if not 1 < found < math.inf or "," in text:
        raise BadInput(f"--{name}={text} must be one number above 1, such as 10")
    return found


def read_vary(texts: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The settings of --vary. Raises BadInput for one without values, or given twice."""
    found = []
    for text in texts:
        name, _, values = text.partition("=")
        if not name or not all(values.split(",")):
            raise BadInput(f"--vary={text} must be NAME=VALUE,VALUE, such as --vary=optim.peak_lr=1e-3,2e-3")
        found.append((name.removeprefix("config."), tuple(values.split(","))))
    if len({name for name, _ in found}) < len(found):
        raise BadInput("--vary names a setting twice; give it all its values at once")
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class LabFlags:
    """The flags of `jaxscale lab`."""

    config: str = flag(DEFAULT, "the run that is varied", "FILE")
    settings: dict[str, str] = flag(dict, "sets any setting of it, in all runs", "VALUE", name="config.NAME")
    small: bool = flag(False, "makes a narrow model of two layers of it, with short rows, and says what it changes")
    layers: int | None = flag(None, "at most so many layers, and as many tokens a parameter", "N", least=1)
    workdir: str | None = flag(None, "where runs and pages go; default runs/lab-<config>", "FOLDER")
    seeds: int = flag(0, "runs of each setting that differ in seed alone; 0: as many as the experiment has", least=0)
    rates: tuple[float, ...] = flag(
        (), "rate, batch, optimizers, clipping, width, shape: learning rates", "1e-3,2e-3", read=numbers(float)
    )
    batches: tuple[int, ...] = flag((), "rate, batch: tokens of a step", "1024,4096", read=numbers(int))
    sizes: tuple[float, ...] = flag(
        (), "isoflop, ladder, width: widths, shape: layers, as times of the config's", "0.5,1,2", read=numbers(float)
    )
    target: float = flag(
        0.0, "ladder: trains a model of so many times the parameters of the largest rung too", "10", read=times_above_1
    )
    names: tuple[str, ...] = flag(
        (),
        "rate, optimizers: optimizers; precision: forms",
        "adamw,lion",
        read=lambda _, text: tuple(dict.fromkeys(text.split(","))),
    )
    vary: tuple[str, ...] = flag((), "vary: a setting and its values; all combinations are run", "NAME=VALUE,VALUE")
    jobs: int = flag(0, "runs at a time; 0: one for each core, on CPUs", least=0)
    dry_run: bool = flag(False, "prints a command for each run that is not done, for Slurm, GKE or TPU VMs, and ends")


SUBVERBS = {name: tuple(field.name for field in dataclasses.fields(LabFlags)) for name in EXPERIMENTS}


@command(LabFlags, subverbs=SUBVERBS)
def main(arguments: Arguments) -> int:
    """Runs the experiment and returns the exit code."""
    flags, name = arguments.flags, arguments.subverb
    check_flags(flags, name)
    base = base_of(arguments)
    check_held_out(base.cfg)
    work = paths.as_path(flags.workdir or f"runs/lab-{config_name(flags.config)}")
    options = Options(
        flags.seeds, flags.rates, flags.batches, flags.sizes, flags.target, flags.names, read_vary(flags.vary)
    )
    jobs = flags.jobs or running.default_jobs(os.environ.get("JAX_PLATFORMS"))
    seen: dict[str, Result] = {}

    def run(trials: Sequence[Trial]) -> list[Result]:
        once = distinct(trials)
        if flags.dry_run and (lines := running.command_lines(once, work)):
            put(*lines)
            raise Planned
        results = {r.trial.digest: r for r in running.run_all(once, work, jobs=jobs, say=put)}
        seen.update(results)
        return [results[trial.digest]._replace(trial=trial) for trial in trials]

    experiment = EXPERIMENTS[name]
    try:
        found = experiment.answer(base, options, run)
    except Planned:
        return 0
    put("", experiment.question, *(f"  {capital(line)}" for line in found.verdict))
    page = work / f"{name}.html"
    paths.write_text_atomic(page, lab_page(name, experiment, base, list(seen.values()), found))
    put(page.absolute().as_uri() if not paths.is_remote(str(page)) else str(page))
    return 0


def base_of(arguments: Arguments) -> Base:
    """The config of the command line, as small as it was asked for, which is said; what was told stays."""
    flags, told = arguments.flags, arguments.overrides
    base = Base.load(flags.config, told)
    if not flags.small and flags.layers is None:
        return base
    cut = as_overrides(base.cfg, shrink(base.cfg, layers=flags.layers, small=flags.small, told=told))
    cfg = with_its_training(Base.load(flags.config, {}).cfg, Base.load(flags.config, {**cut, **told}).cfg, told)
    changed = {name: value for name, value in as_overrides(base.cfg, cfg).items() if name not in told}
    if not flags.dry_run:  # whose output is commands alone, and has all settings
        put("changed for a small model:", *(f"  {name}: {value}" for name, value in changed.items()))
    return Base.load(flags.config, {**changed, **told})


def check_flags(flags: LabFlags, name: str) -> None:
    """Raises BadInput for a flag that the experiment does not read."""
    read_by = {
        "rates": ("rate", "batch", "optimizers", "clipping", "width", "shape"), "batches": ("rate", "batch"),
        "sizes": ("isoflop", "ladder", "shape", "width"), "target": ("ladder",),
        "names": ("rate", "optimizers", "precision"), "vary": ("vary",),
    }  # fmt: skip
    for flag_name, experiments in read_by.items():
        if getattr(flags, flag_name) and name not in experiments:
            raise BadInput(f"--{flag_name} is for jaxscale lab {', '.join(experiments)}; lab {name} does not read it")
    if flags.seeds and name == "resume":
        raise BadInput("lab resume compares runs of one seed; leave --seeds out")


def check_held_out(cfg: RunConfig) -> None:
    """Raises BadInput for a config whose runs end without a held-out loss: each would count as diverged."""
    if not cfg.eval.num_rows:
        raise BadInput("eval.num_rows=0, and the lab compares held-out losses; give --config.eval.num_rows=64")
    if not (cfg.data.val_fraction or cfg.data.val_files or cfg.data.name == "synthetic"):
        raise BadInput(
            "no data are held out, and the lab compares held-out losses; give --config.data.val_fraction=0.01"
        )


if __name__ == "__main__":
    run_verb("lab")
