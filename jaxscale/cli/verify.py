"""Proofs on your own config, on this machine's CPU, before anything is spent.

  jaxscale verify resume --config=FILE    killing a run twice and starting it again equals never stopping, bit for bit
  jaxscale verify parity --config=FILE    one device, each axis (pipeline, data, fsdp, context, tensor; expert, both
                                          ways, for a mixture), each pair of them and four at a time, ZeRO 1 to 3 and
                                          accumulation give the same losses and gradients, on up to 16 simulated devices

The exit code is 0 if the proof holds and 1 if not; what was changed in the config is printed.
"""

import dataclasses
import sys
from typing import Literal

from jaxscale import config_file
from jaxscale.cli import run_verb, verify_parity, verify_resume
from jaxscale.cli.shrink import changes_text, is_large, shrink, use_available_data
from jaxscale.command_line import Arguments, flag
from jaxscale.config import RunConfig
from jaxscale.help_text import command
from jaxscale.system.exits import Exit, put

SHARED = ("config", "settings", "layers", "small")
SUBVERBS = {"resume": (*SHARED, "steps", "devices", "workdir"), "parity": SHARED}


@dataclasses.dataclass(frozen=True)
class VerifyFlags:
    """The flags of `jaxscale verify`."""

    config: str = flag("", None, "FILE")
    settings: dict[str, str] = flag(dict, "sets any setting, as in training", "VALUE", name="config.NAME")
    layers: int | None = flag(None, "at most so many layers", "N", least=1)
    small: Literal["on", "off", "auto"] = flag(
        "auto", "on: a narrow model and short rows; off: the sizes of the config; auto: on if they are large"
    )
    steps: int = flag(12, "resume: steps of each run", least=verify_resume.LEAST_STEPS)
    devices: int = flag(1, "resume: simulated devices", least=1)
    workdir: str | None = flag(
        None, "resume: where the two runs go; default a temporary folder. Kept if they differ", "FOLDER"
    )


@command(VerifyFlags, subverbs=SUBVERBS, alone="--help")
def main(arguments: Arguments) -> int:
    """Runs the proof that is named and returns the exit code."""
    return (resume if arguments.subverb == "resume" else parity)(arguments)


def resume(arguments: Arguments) -> int:
    """`jaxscale verify resume`."""
    flags = arguments.flags
    cfg, wanted = prepared(arguments, copies=flags.devices)
    wanted = verify_resume.settings(wanted, flags.steps, flags.devices)
    put(*changes_text(cfg, wanted))
    done = verify_resume.verify(wanted, flags.steps, flags.devices, flags.workdir)
    put(*done.lines())
    return Exit.DONE if done.exact else Exit.ERROR


def parity(arguments: Arguments) -> int:
    """`jaxscale verify parity`; starts itself again where jax would not see the simulated devices."""
    verify_parity.on_simulated_devices([sys.executable, "-m", "jaxscale.cli.verify", "parity", *arguments.words])
    cfg, wanted = prepared(arguments, copies=verify_parity.NUM_DEVICES)
    wanted = verify_parity.settings(wanted)
    put(*changes_text(cfg, wanted))
    done = verify_parity.verify(wanted, verify_parity.layouts(wanted), put)
    put(*done.lines())
    return Exit.DONE if done.agrees else Exit.ERROR


def prepared(arguments: Arguments, copies: int) -> tuple[RunConfig, RunConfig]:
    """(the user's config, the same as small as it was asked for and with data that can be read here)."""
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
