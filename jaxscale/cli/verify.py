"""Checks of your config on this machine's CPU.

  jaxscale verify resume --config=FILE    a run that is killed and restarted twice equals an uninterrupted one, bitwise
  jaxscale verify parity --config=FILE    losses and gradients agree between one device, each mesh axis (pipeline, data,
                                          fsdp, context, tensor; expert, with both exchanges, for a mixture of experts),
                                          pairs of axes, four axes, ZeRO 1 to 3 and accumulation, on up to 16 simulated
                                          devices

Exit code 0 if the check passes, 1 if not. Changes that are made to the config are printed.
"""

import dataclasses
import sys
from typing import Literal

from jaxscale.cli import run_verb, verify_parity, verify_resume
from jaxscale.cli.shrink import changes_text, is_large, shrink, use_available_data
from jaxscale.config import RunConfig
from jaxscale.settings import config_file
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system.exits import Exit, put

SHARED = ("config", "settings", "layers", "small")
SUBVERBS = {"resume": (*SHARED, "steps", "devices", "workdir"), "parity": SHARED}


@dataclasses.dataclass(frozen=True)
class VerifyFlags:
    """The flags of `jaxscale verify`."""

    config: str = flag("", None, "FILE")
    settings: dict[str, str] = flag(dict, "sets any setting, as in training", "VALUE", name="config.NAME")
    layers: int | None = flag(None, "at most N layers", "N", least=1)
    small: Literal["on", "off", "auto"] = flag(
        "auto", "on: a narrow model and short rows; off: the config's sizes; auto: on for a large config"
    )
    steps: int = flag(12, "resume: steps of each run", least=verify_resume.LEAST_STEPS)
    devices: int = flag(1, "resume: simulated devices", least=1)
    workdir: str | None = flag(
        None, "resume: folder of the two runs, which is kept if they differ; default: a temporary folder", "FOLDER"
    )


@command(VerifyFlags, subverbs=SUBVERBS, alone="--help")
def main(arguments: Arguments) -> int:
    """Runs the named check and returns the exit code."""
    return (resume if arguments.subverb == "resume" else parity)(arguments)


def resume(arguments: Arguments) -> int:
    """`jaxscale verify resume`."""
    flags = arguments.flags
    cfg, checked = prepared(arguments, copies=flags.devices)
    checked = verify_resume.settings(checked, flags.steps, flags.devices)
    put(*changes_text(cfg, checked))
    done = verify_resume.verify(checked, flags.steps, flags.devices, flags.workdir)
    put(*done.lines())
    return Exit.DONE if done.exact else Exit.ERROR


def parity(arguments: Arguments) -> int:
    """`jaxscale verify parity`. Re-executes this process if jax would not see the simulated devices."""
    verify_parity.on_simulated_devices([sys.executable, "-m", "jaxscale.cli.verify", "parity", *arguments.words])
    cfg, checked = prepared(arguments, copies=verify_parity.NUM_DEVICES)
    checked = verify_parity.settings(checked)
    put(*changes_text(cfg, checked))
    done = verify_parity.verify(checked, verify_parity.layouts(checked), put)
    put(*done.lines())
    return Exit.DONE if done.agrees else Exit.ERROR


def prepared(arguments: Arguments, copies: int) -> tuple[RunConfig, RunConfig]:
    """Returns (the user's config, the same reduced as requested and with readable data)."""
    cfg = config_file.load_config(arguments.config, arguments.overrides)
    flags = arguments.flags
    small = is_large(cfg, copies) if flags.small == "auto" else flags.small == "on"
    smaller = shrink(cfg, layers=flags.layers, small=small)
    smaller, problems = use_available_data(smaller)
    for problem in problems:
        put(f"synthetic tokens instead of the config's data: {problem}")
    return cfg, smaller


if __name__ == "__main__":
    run_verb("verify")
