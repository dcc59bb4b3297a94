"""Proofs on your own config, on this machine's CPU, before anything is spent.

  jaxscale verify resume --config=FILE    killing a run twice and starting it again equals never stopping, bit for bit
  jaxscale verify parity --config=FILE    one device, data, fsdp, tensor, ZeRO 1 to 3 and accumulation give the same
                                          losses and gradients, on 8 simulated devices
  --config.NAME=VALUE     sets any setting, as in training
  --layers=N              at most so many layers
  --small=auto            on: a narrow model and short rows; off: the sizes of the config; auto: on if they are large
  --steps=12              resume: steps of each run
  --devices=1             resume: simulated devices
  --workdir=FOLDER        resume: where the two runs go; default a temporary folder. Kept if they differ

The exit code is 0 if the proof holds and 1 if not; what was changed in the config is printed.
"""

import sys

from jaxscale import config
from jaxscale.cli import run_verb, verify_parity, verify_resume
from jaxscale.cli.shrink import changes_text, is_large, shrink, use_available_data
from jaxscale.command_line import Arguments, parse_arguments, whole_number
from jaxscale.config import RunConfig
from jaxscale.help_text import show_help
from jaxscale.system.exits import BadInput, Exit, put

SHARED_OPTIONS = ("layers", "small")
OPTIONS = {"resume": (*SHARED_OPTIONS, "steps", "devices", "workdir"), "parity": SHARED_OPTIONS}


def main(argv: list[str]) -> int:
    """Runs the proof that argv names and returns the exit code."""
    what, *rest = argv or ["--help"]
    if what in ("-h", "--help"):
        show_help(__doc__)
        return 0
    if what not in OPTIONS:
        raise BadInput(f"jaxscale verify has no proof {what!r}; it has {', '.join(OPTIONS)}")
    arguments = parse_arguments(rest, OPTIONS[what])
    if arguments.help:
        show_help(__doc__)
        return 0
    return resume(arguments) if what == "resume" else parity(arguments, rest)


def resume(arguments: Arguments) -> int:
    """`jaxscale verify resume`."""
    options = arguments.options
    steps = whole_number("steps", options.get("steps", "12"), verify_resume.LEAST_STEPS)
    devices = whole_number("devices", options.get("devices", "1"), 1)
    cfg, wanted = prepared(arguments, copies=devices)
    wanted = verify_resume.settings(wanted, steps, devices)
    put(*changes_text(cfg, wanted))
    done = verify_resume.verify(arguments, cfg, wanted, steps, devices, options.get("workdir"))
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
    options = arguments.options
    layers = whole_number("layers", options["layers"], 1) if "layers" in options else None
    small = options.get("small", "auto")
    if small not in ("on", "off", "auto"):
        raise BadInput(f"--small={small} must be on, off or auto")
    smaller = shrink(cfg, layers=layers, small=is_large(cfg, copies) if small == "auto" else small == "on")
    smaller, problems = use_available_data(smaller)
    for problem in problems:
        put(f"synthetic tokens instead of the config's data: {problem}")
    return cfg, smaller


if __name__ == "__main__":
    run_verb("verify")
