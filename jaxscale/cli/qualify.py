"""What to run first on new chips: are they what was paid for, do the kernels compute right, is one of them slow.

  jaxscale qualify --out=FOLDER

Measured, in 8 minutes: matrix products, memory and links beside the datasheet; every device beside the others; each
kernel beside its definition in float32; a training step of the 1B class, or a smaller one that fits, beside the
compiler's memory and the roofline, and how much of its communication is hidden; saves and restores. It writes
FOLDER/qualify.html and FOLDER/qualify.json again after each probe, and keeps the step for `jaxscale plan`.

Of several hosts each runs the same command, and the first one writes. Exit code 0: qualified; 3: below a floor, or a
probe failed; 15: a probe hung.
"""

import dataclasses
import math

import jax

from jaxscale import config_file
from jaxscale.cli import run_verb
from jaxscale.command_line import Arguments, flag
from jaxscale.config import RunConfig
from jaxscale.config_file import config_name
from jaxscale.hardware import Chip, find_chip
from jaxscale.help_text import command
from jaxscale.hosts import cluster
from jaxscale.hosts.watchdog import Watchdog
from jaxscale.planning.check import check_machine
from jaxscale.qualify.page import summary_lines
from jaxscale.qualify.result import Floors, Limits, Machine, Qualification, usual_mfu_floor
from jaxscale.qualify.run import PROBES, qualify
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit

LEAST_LIMIT = 60.0  # seconds: less than that a first compilation may take
DEFAULTS = Floors()


def above_0(name: str, text: str) -> float:
    """A number above 0. Raises BadInput naming the flag."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise BadInput(f"--{name}={text} must be a number above 0")
    return number


def probes_of(name: str, text: str) -> tuple[str, ...]:
    """'products,links' as names. Raises BadInput for one that is none."""
    names = tuple(text.split(","))
    if unknown := [one for one in names if one not in PROBES]:
        raise BadInput(f"--{name}={unknown[0]} is no probe; there are {', '.join(PROBES)}")
    return names


def floor(default: float, help: str) -> float:
    """A flag for a floor."""
    return flag(default, help, f"{default:g}", read=above_0)


@dataclasses.dataclass(frozen=True)
class QualifyFlags(cluster.HostFlags):
    """The flags of `jaxscale qualify`."""

    out: str = flag("qualify", "where the page and the JSON are written", "FOLDER")
    saves: str | None = flag(
        None, "where saves are tried, gs:// too; default FOLDER. 4 GiB of each process, removed afterwards", "FOLDER"
    )
    minutes: float = flag(
        8.0, "no probe begins after that; one that takes as long alone hangs (exit 15)", "8", read=above_0
    )
    only: tuple[str, ...] = flag(PROBES, f"some of {', '.join(PROBES)}", "products,links", read=probes_of)
    config: str = flag("", "times the step of this config in place of the 1B class", "FILE")
    settings: dict[str, str] = flag(dict, "sets any setting of that", "VALUE", name="config.NAME")
    devices: int | None = flag(None, "simulated CPU devices", "8", least=1)
    products_floor: float = floor(DEFAULTS.products, "least share of the datasheet's FLOP/s, in each type")
    bandwidth_floor: float = floor(DEFAULTS.bandwidth, "of its memory bandwidth")
    links_floor: float = floor(DEFAULTS.links, "of its link bandwidth, at the largest size along one dimension")
    mfu_floor: float | None = flag(
        None, "least MFU of the step; default 0.38 on chips of H100's architecture, none on others", "0.4", read=above_0
    )
    memory_within: float = floor(
        DEFAULTS.memory_within, "how far the step's peak may be from the compiler's figure, as a share of that"
    )
    slow: float = floor(DEFAULTS.slow, "a device is slow that takes more than this times the median")

    def floors(self, chip: Chip | None) -> Floors:
        """The limits of the figures on these chips."""
        return Floors(
            products=self.products_floor,
            bandwidth=self.bandwidth_floor,
            links=self.links_floor,
            mfu=usual_mfu_floor(chip) if self.mfu_floor is None else self.mfu_floor,
            memory_within=self.memory_within,
            slow=self.slow,
        )


@command(QualifyFlags)
def main(arguments: Arguments) -> int:
    """Measures, prints the summary and returns the exit code."""
    flags: QualifyFlags = arguments.flags
    own_model = model_of(arguments)
    if flags.devices:
        jax.config.update("jax_num_cpu_devices", flags.devices)
    facts = {f"--{name}": str(value) for name, value in vars(flags).items() if name not in cluster.FLAGS}
    with cluster.joined(cluster.discover_process(arguments.options), facts, arguments.options) as team:
        result = measure(flags, own_model, team)
        team("\n".join(["", *summary_lines(result)]))
        folder = paths.absolute(flags.out)
        team(f"written to {folder / 'qualify.html'} and qualify.json")
    return Exit.DONE if result.passed else Exit.NO_GO


def model_of(arguments: Arguments) -> tuple[str, RunConfig] | None:
    """(name, config) of --config; None without it."""
    if arguments.config:
        return config_name(arguments.config), config_file.load_config(arguments.config, arguments.overrides)
    if arguments.overrides:
        raise BadInput(f"--config.{next(iter(arguments.overrides))} sets a setting of a config; give --config=FILE too")
    return None


def measure(flags: QualifyFlags, own_model: tuple[str, RunConfig] | None, team: cluster.Team) -> Qualification:
    """All that was found, by this process and the others."""
    folder, seconds = paths.absolute(flags.out), 60 * flags.minutes
    if own_model is not None:  # before minutes of other probes; none of its data are read
        cfg = own_model[1]
        check_machine(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, name="synthetic")))
    if jax.process_index() == 0:
        paths.make_run_dir(folder, paths.PRIVATE)
    limits = Limits.all(max(LEAST_LIMIT, seconds))
    with Watchdog(folder, limits, others=team, setting="--minutes") as dog:
        devices = tuple(jax.devices())
        chip = find_chip(devices[0].device_kind)
        machine = Machine(
            devices=devices,
            chip=chip,
            floors=flags.floors(chip),
            folder=folder,
            save_folder=flags.saves or folder,
            seconds=seconds,
            own_model=own_model,
            phase=dog.phase,
        )
        return qualify(machine, only=flags.only, say=team)


if __name__ == "__main__":
    run_verb("qualify")
