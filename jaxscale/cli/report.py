"""Writes one HTML page about a run, or about several beside each other: open it in any browser, send it on, print it.

  jaxscale report --workdir=RUN                    report.html: curves, cost, data, settings, samples, incidents
  jaxscale report --workdir=A --workdir=B          both in each plot, and the settings in which they differ
  --output=report.html    where the page is written
  --price=DOLLARS         what an hour of one chip costs, for the cost so far and in all; without it the list price
                          of hardware.py, where that has one
  --card                  card.md in its place: a short page in Markdown, a column for each run
  --serve[=PORT]          no file: the page at http://127.0.0.1:PORT, made anew as the run goes on, until Ctrl-C;
                          default port 8642, 0: any free one

The last line printed is the page's address, or the card's path.

The page is one file without anything from elsewhere, and runs without a network. A run may be under way: what it has
written so far is shown. Folders in a bucket (gs://) are read where they are. No device is touched.
"""

import math
import time
from collections.abc import Sequence

from jaxscale import units
from jaxscale.checkpoint.cause import reached, short_cause, written
from jaxscale.cli import run_verb
from jaxscale.command_line import parse_arguments, take_switches, whole_number
from jaxscale.help_text import show_help
from jaxscale.reporting import make_card, make_page
from jaxscale.reporting.history import History, read_history
from jaxscale.reporting.serve import Pages, open_server
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, put

OPTIONS = ("output", "price", "serve")
PORT = 8642
HIGHEST_PORT = 65_535


def main(argv: list[str]) -> int:
    """Writes or serves the page and returns the exit code."""
    workdirs, rest = take_workdirs(argv)
    rest, switches = take_switches(rest, (), ("card",))
    arguments = parse_arguments([f"--serve={PORT}" if flag == "--serve" else flag for flag in rest], OPTIONS)
    if arguments.help:
        show_help(__doc__)
        return 0
    if arguments.config or arguments.overrides:
        raise BadInput("a report takes no --config: the settings of a run are read from its work folder")
    if not workdirs:
        raise BadInput("--workdir must be given, the folder of a run; more than one compares them")
    options = arguments.options
    price = price_of(options["price"]) if "price" in options else None
    if "serve" in options:
        if "output" in options or switches:
            raise BadInput("--serve writes no file; leave out --output and --card, or --serve")
        return serve(workdirs, price, port_of(options["serve"]))
    output = options.get("output", "card.md" if switches else "report.html")
    if not paths.is_remote(output) and not paths.as_path(output).parent.is_dir():
        raise BadInput(f"--output={output} is in no folder that is there; make it, or choose another")
    if not paths.is_remote(output) and paths.as_path(output).is_dir():
        raise BadInput(f"--output={output} is a folder; name a file, such as {output.rstrip('/')}/report.html")
    page = (make_card if switches else make_page)(read_all(workdirs), price=price, now=time.time())
    written(lambda: paths.write_text_atomic(output, page), output)
    way_on = "" if switches else "; open it in a browser:"
    put(f"{output}: {', '.join(workdirs)}, {units.size(len(page.encode()))}{way_on}")
    put(output if paths.is_remote(output) or switches else paths.as_path(output).absolute().as_uri())
    return 0


def take_workdirs(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the values of all --workdir, the other arguments). Raises BadInput for one without a value, or given twice."""
    found, rest, pending = [], [], list(argv)
    while pending:
        flag = pending.pop(0)
        name, equals, value = flag.partition("=")
        if name != "--workdir":
            rest.append(flag)
            continue
        value = value if equals or not pending or pending[0].startswith("--") else pending.pop(0)
        if not value:
            raise BadInput("--workdir needs a value: --workdir=FOLDER")
        if value in found:
            raise BadInput(f"--workdir={value} is given twice")
        found.append(value)
    return found, rest


def price_of(text: str) -> float:
    """The value of --price. Raises BadInput if it is no amount of money."""
    try:
        price = float(text.removeprefix("$"))
    except ValueError:
        price = math.nan
    if not (math.isfinite(price) and price >= 0):
        raise BadInput(f"--price={text} must be dollars for one hour of one chip, such as 4.20")
    return price


def port_of(text: str) -> int:
    """The value of --serve. Raises BadInput if it is no port."""
    port = whole_number("serve", text, 0)
    if port > HIGHEST_PORT:
        raise BadInput(f"--serve={text} is no port; give 0 (any free one) to {HIGHEST_PORT}")
    return port


def read_all(workdirs: Sequence[str]) -> list[History]:
    """The runs. Raises BadInput for a folder that holds none, Stop (STORAGE) for a bucket that cannot be reached."""
    return [read_one(workdir) for workdir in workdirs]


def read_one(workdir: str) -> History:
    """The run in one folder."""
    try:
        return reached(lambda: read_history(workdir), workdir)
    except OSError as error:
        raise BadInput(f"workdir={workdir} cannot be read: {short_cause(error)}") from None


def serve(workdirs: Sequence[str], price: float | None, port: int) -> int:
    """Serves the page on this machine alone until Ctrl-C."""
    pages = Pages(lambda version: make_page(read_all(workdirs), price=price, version=version), workdirs)
    pages.page()  # what is wrong with the folders is told now, in one line
    with open_server(pages, port) as server:
        put(f"http://127.0.0.1:{server.server_address[1]}/ for this machine alone; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            put("")
    return 0


if __name__ == "__main__":
    run_verb("report")
