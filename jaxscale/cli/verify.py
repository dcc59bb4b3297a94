"""Proofs on your own config, on this machine's CPU, before anything is spent.

  jaxscale verify resume --config=FILE    killing a run twice and starting it again equals never stopping, bit for bit
  jaxscale verify parity --config=FILE    one device, data, fsdp, tensor, ZeRO 1 to 3 and accumulation give the same
                                          losses and gradients, on 8 simulated devices

The exit code is 0 if the proof holds and 1 if not; what was changed in the config is printed.
"""

import dataclasses
import sys
from typing import Literal

from jaxscale import config
from jaxscale.cli import run_verb, verify_parity, verify_resume
from jaxscale.cli.shrink import changes_text, is_large, shrink, use_available_data
from jaxscale.command_line import Arguments, flag, parse
from jaxscale.config import RunConfig
from jaxscale.help_text import page_of, show_help
from jaxscale.system.exits import BadInput, Exit, put

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


FLAGS, HELP = VerifyFlags, page_of(__doc__, VerifyFlags)


def main(argv: list[str]) -> int:
    """Runs the proof that argv names and returns the exit code."""
    what, *rest = argv or ["--help"]
    if what not in (*SUBVERBS, "-h", "--help"):
        raise BadInput(f"jaxscale verify has no proof {what!r}; it has {', '.join(SUBVERBS)}")
    arguments = parse(rest if what in SUBVERBS else argv or [what], VerifyFlags, SUBVERBS.get(what))
    if arguments.help:
        show_help(HELP)
        return 0
    return resume(arguments) if what == "resume" else parity(arguments, rest)


def resume(arguments: Arguments) -> int:
    """`jaxscale verify resume`."""
    flags = arguments.flags
    cfg, wanted = prepared(arguments, copies=flags.devices)
    wanted = verify_resume.settings(wanted, flags.steps, flags.devices)
    put(*changes_text(cfg, wanted))
    done = verify_resume.verify(arguments, cfg, wanted, flags.steps, flags.devices, flags.workdir)
    put(*done.lines())
    return Exit.DONE if done.exact else Exit.ERROR


def parity(arguments: Arguments, argv: list[str]) -> int:
    """`jaxscale verify parity`; starts itself again where jax would not see the simulated devices."""
    verify_parity.on_simulated_devices([sys.executable, "-m", "jaxscale.cli.verify", "parity", *argv])
    cfg, wanted = prepared(arguments, copies=verify_parity.NUM_DEVICES)
    wanted = verify_parity.settings(wanted)
    put(*changes_text(cfg, wanted))
    done = verify_parity.verify(wanted, verify_parity.layouts(wanted), put)
    put(*done.lines())
    return Exit.DONE if done.agrees else Exit.ERROR


def prepared(arguments: Arguments, copies: int) -> tuple[RunConfig, RunConfig]:
    """(the user's config, the same as small as it was asked for and with data that can be read here)."""
    cfg = config.load_config(arguments.config, arguments.overrides)
    flags = arguments.flags
    small = is_large(cfg, copies) if flags.small == "auto" else flags.small == "on"
    smaller = shrink(cfg, layers=flags.layers, small=small)
    smaller, problems = use_available_data(smaller)
    for problem in problems:
        put(f"synthetic tokens instead of the config's data: {problem}")
    return cfg, smaller


if __name__ == "__main__":
    run_verb("verify")
