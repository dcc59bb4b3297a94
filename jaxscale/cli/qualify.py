"""Tests new chips: speed relative to the datasheet, correctness of the kernels, and slow devices.

  jaxscale qualify --out=FOLDER

Measures, in 8 minutes: matmuls, memory and links relative to the datasheet; differences between devices; each kernel
compared with a float32 reference; a training step of a 1B model, or a smaller one that fits, compared with the
compiler's memory estimate and the roofline, and its communication overlap; saves and restores. Updates
FOLDER/qualify.html and FOLDER/qualify.json after each probe, and saves the step's speed for `jaxscale plan`.

On several hosts, run the same command on each host; the first host writes. Exit code 0: qualified; 3: a result is below
its floor, or a probe failed; 15: a probe hung.
"""

import dataclasses

import jax

from jaxscale.config import RunConfig
from jaxscale.kernels.hardware import Chip, find_chip
from jaxscale.program.machine_check import check_machine
from jaxscale.runtime.hosts import cluster
from jaxscale.runtime.hosts.watchdog import Watchdog
from jaxscale.settings import config_file
from jaxscale.settings.command_line import Arguments, flag, positive
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit
from jaxscale.tools.qualify.qualification_page import summary_lines
from jaxscale.tools.qualify.result import Floors, Machine, Qualification, phase_limits, usual_mfu_floor
from jaxscale.tools.qualify.run import PROBES, qualify

MIN_LIMIT = 60.0  # seconds, enough for the first compilation
DEFAULTS = Floors()


def probes_of(name: str, text: str) -> tuple[str, ...]:
    """Parses a list of probes such as 'products,links'. Raises BadInput for an unknown probe."""
    names = tuple(text.split(","))
    if unknown := [one for one in names if one not in PROBES]:
        raise BadInput(f"--{name}={unknown[0]} is not a probe; use any of {', '.join(PROBES)}")
    return names


def floor(default: float, help: str) -> float:
    """Returns a flag for the floor (minimum or limit) of a result."""
    return flag(default, help, f"{default:g}", read=positive)


@dataclasses.dataclass(frozen=True)
class QualifyFlags(cluster.HostFlags):
    out: str = flag("qualify", "folder for the page and the JSON file", "FOLDER")
    saves: str | None = flag(
        None, "folder for test saves, or gs://; default: --out. 4 GiB per process, deleted afterwards", "FOLDER"
    )
    minutes: float = flag(
        8.0,
        "starts no probe after this time; a single probe that takes longer is treated as hung (exit code 15)",
        "8",
        read=positive,
    )
    only: tuple[str, ...] = flag(PROBES, f"a subset of {', '.join(PROBES)}", "products,links", read=probes_of)
    config: str = flag("", "times the step of this config instead of the 1B model", "FILE")
    settings: dict[str, str] = flag(dict, "sets any setting of that config", "VALUE", name="config.NAME")
    devices: int | None = flag(None, "simulated CPU devices", "8", least=1)
    products_floor: float = floor(DEFAULTS.products, "minimum fraction of the datasheet's FLOP/s, for each dtype")
    bandwidth_floor: float = floor(DEFAULTS.bandwidth, "minimum fraction of the datasheet's memory bandwidth")
    links_floor: float = floor(
        DEFAULTS.links, "minimum fraction of the datasheet's link bandwidth, for the largest array"
    )
    mfu_floor: float | None = flag(
        None, "minimum MFU of the step; default: 0.38 on H100-class chips, none on others", "0.4", read=positive
    )
    memory_within: float = floor(
        DEFAULTS.memory_within, "allowed relative difference between the step's peak memory and the compiler's estimate"
    )
    slow: float = floor(DEFAULTS.slow, "a device that takes more than this multiple of the median is slow")

    def floors(self, chip: Chip | None) -> Floors:
        """Returns the floors for these chips."""
        mfu = usual_mfu_floor(chip) if self.mfu_floor is None else self.mfu_floor
        floors = dict(products=self.products_floor, bandwidth=self.bandwidth_floor, links=self.links_floor)
        return Floors(**floors, mfu=mfu, memory_within=self.memory_within, slow=self.slow)


@command(QualifyFlags)
def main(arguments: Arguments) -> int:
    """Measures, prints the summary and returns the exit code."""
    flags: QualifyFlags = arguments.flags
    model = model_of(arguments)
    if flags.devices:
        jax.config.update("jax_num_cpu_devices", flags.devices)
    facts = {f"--{name}": str(value) for name, value in vars(flags).items() if name not in cluster.FLAGS}
    with cluster.joined(cluster.discover_process(arguments.options), facts, arguments.options) as team:
        result = measure(flags, model, team)
        team("\n".join(["", *summary_lines(result)]))
        folder = paths.absolute(flags.out)
        team(f"written to {folder / 'qualify.html'} and qualify.json")
    return Exit.DONE if result.passed else Exit.NO_GO


def model_of(arguments: Arguments) -> tuple[str, RunConfig] | None:
    """Returns (name, config) of --config, or None without --config."""
    if arguments.config:
        return config_file.config_name(arguments.config), config_file.load_config(arguments.config, arguments.overrides)
    if arguments.overrides:
        raise BadInput(f"--config.{next(iter(arguments.overrides))} requires a config; also set --config=FILE")
    return None


def measure(flags: QualifyFlags, model: tuple[str, RunConfig] | None, team: cluster.Team) -> Qualification:
    """Runs all probes on all hosts and returns the results."""
    folder, seconds = paths.absolute(flags.out), 60 * flags.minutes
    if model is not None:  # checked before minutes of other probes; the data of the config are not read
        cfg = model[1]
        check_machine(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, name="synthetic")))
    if jax.process_index() == 0:
        paths.make_run_dir(folder, paths.PRIVATE)
    limits = phase_limits(max(MIN_LIMIT, seconds))
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
            user_model=model,
            phase=dog.phase,
        )
        return qualify(machine, only=flags.only, say=team)
