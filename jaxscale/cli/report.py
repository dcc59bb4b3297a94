"""Writes one HTML page about a run, or a comparison of several runs.

  jaxscale report --workdir=RUN                    report.html: curves, cost, data, settings, samples, incidents
  jaxscale report --workdir=A --workdir=B          both runs in each plot, and the settings in which they differ

The last printed line is the URL of the page, or the path of the card.

The page is one self-contained file that works offline. A training in progress is shown up to its latest metrics.
Folders may be in a bucket (gs://). Needs no device.
"""

import collections
import dataclasses
import time
from collections.abc import Sequence

from jaxscale import units
from jaxscale.api.reports import price_of, read_all
from jaxscale.runtime.checkpoint.storage_errors import stop_if_unwritable
from jaxscale.settings.command_line import Arguments, flag, port_of
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, put
from jaxscale.tools.reporting.card import make_card
from jaxscale.tools.reporting.page import make_page
from jaxscale.tools.reporting.serve import Pages, ReportHandler, ReportServer

PORT = 8642


@dataclasses.dataclass(frozen=True)
class ReportFlags:
    no_config = "the settings of a run are read from its work folder"

    workdir: tuple[str, ...] = flag((), None, "FOLDER")
    output: str | None = flag(None, "output file", "report.html")
    price: float | None = flag(
        None,
        "price of one chip hour, for the cost so far and in total; default: the list price in kernels/hardware.py",
        "DOLLARS",
        read=lambda name, text: price_of(f"--{name}", text),
    )
    card: bool = flag(False, "writes card.md instead: a short Markdown page with a column for each run")
    serve: int | None = flag(
        None,
        "serves the page at http://127.0.0.1:PORT instead, updated while the run trains, until Ctrl-C; "
        f"default port {PORT}, 0: any free port",
        "PORT",
        bare=str(PORT),
        read=port_of,
    )


@command(ReportFlags)
def main(arguments: Arguments) -> None:
    """Writes or serves the page."""
    flags = arguments.flags
    if not flags.workdir:
        raise BadInput("--workdir must be given: the work folder of a run; repeat it to compare runs")
    if repeated := [workdir for workdir, count in collections.Counter(flags.workdir).items() if count > 1]:
        raise BadInput(f"--workdir={repeated[0]} is set twice; remove one")
    if flags.serve is not None:
        if flags.output or flags.card:
            raise BadInput("--serve writes no file; remove either --serve, or --output and --card")
        return serve(flags.workdir, flags.price, flags.serve)
    output = flags.output or ("card.md" if flags.card else "report.html")
    if not paths.is_remote(output) and not paths.as_path(output).parent.is_dir():
        raise BadInput(f"--output={output}: its folder does not exist; create it, or use a different folder")
    if not paths.is_remote(output) and paths.as_path(output).is_dir():
        raise BadInput(f"--output={output} is a folder; use a file name, such as {output.rstrip('/')}/report.html")
    page = (make_card if flags.card else make_page)(read_all(flags.workdir), price=flags.price, now=time.time())
    stop_if_unwritable(lambda: paths.write_text_atomic(output, page), output)
    hint = "" if flags.card else "; open it in a browser:"
    put(f"{output}: {', '.join(flags.workdir)}, {units.size(len(page.encode()))}{hint}")
    put(output if paths.is_remote(output) or flags.card else paths.as_path(output).absolute().as_uri())


def serve(workdirs: Sequence[str], price: float | None, port: int) -> None:
    """Serves the page to this machine only, until Ctrl-C."""
    pages = Pages(lambda version: make_page(read_all(workdirs), price=price, version=version), workdirs)
    pages.page()  # raises errors of the folders before serving
    with ReportServer(ReportHandler, port, pages=pages) as server:
        put(f"http://127.0.0.1:{server.server_address[1]}/ (only on this machine); Ctrl-C stops it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            put("")
