"""Trains a language model, or goes on with one.

  jaxscale train --config=configs/quickstart.py --workdir=runs/first      python -m jaxscale.main is the same

--config=FILE           a file with get_config(); FILE.py:TEXT hands TEXT to it
--config.NAME=VALUE     sets any setting by its dotted name, named in the file or not
--skip-data=A:B,C:D     batches [A, B) and [C, D) are never trained on; the same as --config.data.skip_batches
--init_from=RUN         begins with another run's weights; the same as --config.init.from_path
--workdir=FOLDER        where checkpoints and metrics go, and from where a run goes on; default runs/<config>
"""

from collections.abc import Mapping

from jaxscale import config, schema
from jaxscale.checkpoint.cause import reached
from jaxscale.cli import run_verb
from jaxscale.command_line import config_name, parse_arguments, take_switches
from jaxscale.config import RunConfig
from jaxscale.help_text import show_help
from jaxscale.hosts import cluster
from jaxscale.planning.check import check_machine
from jaxscale.run import options as run_options
from jaxscale.run.opening import open_run, train_to_completion
from jaxscale.run.resume_checks import has_begun, recorded_settings
from jaxscale.run.services import run_services
from jaxscale.system.process import files_as
from jaxscale.training.stopping import terminated_well

HELP = f"{__doc__}{run_options.HELP}{cluster.HELP}\n"


def main(argv: list[str]) -> int:
    """Trains to the end and returns the exit code."""
    argv, switches = take_switches(argv, (), run_options.SWITCHES)
    arguments = parse_arguments(argv, options=("workdir", "skip-data", "init_from", *run_options.FLAGS, *cluster.FLAGS))
    if arguments.help:
        show_help(HELP, RunConfig, arguments.topic)
        return 0
    workdir = arguments.options.get("workdir", f"runs/{config_name(arguments.config)}")
    recorded = lambda: reached(lambda: recorded_settings(workdir), workdir)
    cfg = config.load_config(arguments.config, config.with_flags(arguments), recorded)
    options = run_options.parse_options(arguments.options, switches)
    train_in(workdir, cfg, options, arguments.options)
    return 0


def train_in(workdir: str, cfg: RunConfig, options: run_options.RunOptions, flags: Mapping[str, str]) -> None:
    """Trains in a work folder to completion. flags: cluster.FLAGS; where there are none, the cluster is asked."""
    place = cluster.find_own_place(flags)
    facts = {"--workdir": workdir} | options.facts | schema.flatten(schema.to_dict(cfg))
    with terminated_well(), files_as(options.mode), cluster.joined(place, facts, flags) as team:
        check_machine(cfg, begun=reached(lambda: has_begun(workdir), workdir))
        with run_services(cfg, workdir, options, team) as services:
            train_to_completion(open_run(cfg, workdir, team, services=services, options=options))


if __name__ == "__main__":
    run_verb("train")
