"""report(): the HTML page about one or several runs."""

import dataclasses
import html
import time
from collections.abc import Sequence

from jaxscale import units
from jaxscale.api import Trained
from jaxscale.runtime.checkpoint.storage_errors import short_reason, stop_if_unreachable, stop_if_unwritable
from jaxscale.runtime.monitor.history import History, read_history
from jaxscale.settings.command_line import number
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.tools.reporting.page import make_page

FRAME_PIXELS = 720  # height of a report in a notebook


@dataclasses.dataclass(frozen=True, repr=False)
class ReportPage:
    """The page of `jaxscale report`, which a notebook displays."""

    page: str  # self-contained HTML
    name: str
    height: int = FRAME_PIXELS  # height in a notebook, in pixels

    def save(self, path: str) -> str:
        """Writes the page to a local or gs:// file. Returns the path."""
        stop_if_unwritable(lambda: paths.write_text_atomic(path, self.page), path)
        return path

    def _repr_html_(self) -> str:
        """Returns the page in an iframe, so that its styles and scripts do not affect the notebook."""
        return (
            f'<iframe srcdoc="{html.escape(self.page)}" sandbox="allow-scripts" title="{html.escape(self.name)}" '
            f'style="width:100%;height:{self.height}px;border:0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<report of {self.name}, {units.size(len(self.page.encode()))}; .save(FILE) writes it>"


def report(*runs: str | Trained, price: float | None = None, height: int = FRAME_PIXELS) -> ReportPage:
    """Returns a report on one or more runs, like `jaxscale report`. price: dollars per chip hour. height: height of the
    report in a notebook, in pixels."""
    if not runs:
        raise BadInput("report needs a work folder, or several to compare")
    workdirs, hourly = [str(run) for run in runs], None if price is None else price_of("price", str(price))
    return ReportPage(make_page(read_all(workdirs), price=hourly, now=time.time()), ", ".join(workdirs), height)


def price_of(name: str, text: str) -> float:
    """Parses dollars per chip hour. Raises BadInput for other text."""
    return number(name, text, lambda found: found >= 0, "dollars per chip hour, such as 4.20")


def read_all(workdirs: Sequence[str]) -> list[History]:
    """Returns run histories. Raises BadInput for a missing run, and Stop(STORAGE) for an unreachable bucket."""
    runs = []
    for workdir in workdirs:
        try:
            runs.append(stop_if_unreachable(lambda workdir=workdir: read_history(workdir), workdir))
        except OSError as error:
            raise BadInput(f"workdir={workdir} cannot be read: {short_reason(error)}") from None
    return runs
