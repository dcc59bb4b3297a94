"""Trains a language model: python -m jaxscale.main --config=configs/quickstart.py

--config=FILE           a file with get_config(); FILE.py:TEXT hands TEXT to it
--config.NAME=VALUE     sets any setting by its dotted name, named in the file or not
--skip-data=A:B,C:D     batches [A, B) and [C, D) are never trained on; the same as --config.data.skip_batches
--workdir=FOLDER        where checkpoints and metrics go, and from where a run goes on; default runs/<config>
"""

from jaxscale.process import prepare

if __name__ == "__main__":
    prepare()  # before jax is imported

from jaxscale import config, hosts, schema  # noqa: E402
from jaxscale.command_line import config_name, parse_arguments  # noqa: E402
from jaxscale.exits import run_and_exit  # noqa: E402
from jaxscale.planner.check import check_machine  # noqa: E402
from jaxscale.run import open_run  # noqa: E402
from jaxscale.train import loop  # noqa: E402


def main(argv: list[str]) -> int:
    """Trains to the end and returns the exit code."""
    arguments = parse_arguments(argv, options=("workdir", "skip-data", *hosts.FLAGS))
    if arguments.help:
        print(__doc__, hosts.HELP, "\n\nSettings:\n" + config.settings_help(), sep="")
        return 0
    cfg = config.load_config(arguments.config, config.with_skipped(arguments))
    workdir = arguments.options.get("workdir", f"runs/{config_name(arguments.config)}")
    place = hosts.find_own_place(arguments.options)
    facts = {"--workdir": workdir} | schema.flatten(schema.to_dict(cfg))
    with hosts.joined(place, facts, arguments.options) as say:
        check_machine(cfg)
        run = open_run(cfg, workdir, say)
        if run is not None:
            loop.train(run)
    return 0


if __name__ == "__main__":
    run_and_exit(main)
