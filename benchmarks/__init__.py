"""Benchmarks of jaxscale itself, run from a checkout and not installed: `python -m benchmarks.hosts --help`."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxscale.settings.command_line import Arguments
from jaxscale.settings.help_text import Command
from jaxscale.system import process
from jaxscale.system.exits import put, run_and_exit


def run_main(main: Command) -> None:
    """Initializes this process like the jaxscale command, runs the benchmark, and exits with its code."""
    process.open_standard_streams()
    process.use_utf8()
    process.prepare()
    run_and_exit(main)


def use_devices(number: int | None) -> None:
    """Simulates `number` CPU devices, or uses the devices of this machine if it is None."""
    if number:
        jax.config.update("jax_num_cpu_devices", number)


def config_flags(arguments: Arguments) -> list[str]:
    """Returns the flags of jaxscale.main for the config and the settings."""
    settings = [f"--config.{name}={text}" for name, text in arguments.overrides.items()]
    return [f"--config={arguments.config}", *settings]


def show(record: Mapping[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Prints the record as one line of JSON, or as text."""
    put(json.dumps(record) if as_json else "\n".join(lines))
