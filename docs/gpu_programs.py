"""Writes the table of GPU programs in docs/scale.md: JAX_PLATFORMS=cpu python docs/gpu_programs.py

They are compiled ahead of time: that needs jax's CUDA plugin, and no GPU. What is in the user's cache folder is not
compiled again.
"""

import pathlib
import re

from jaxscale.settings.config_file import load_config
from jaxscale.tools.planning.topology import open_topology
from jaxscale.tools.preflight.preflight import preflight

HERE = pathlib.Path(__file__).parent
PROGRAMS = (("7b", "h100:1x8", 32), ("7b", "h100:8x8", 4))  # config, topology, microbatches
MARKS = ("<!-- docs/gpu_programs.py -->\n", "<!-- end -->\n")
HEAD = (
    "| config | GPUs | microbatches | peak memory | asynchronous | hidden | communication | exposed | "
    "minimum step time | maximum MFU |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)


def table_row(name: str, topology: str, microbatches: int) -> str:
    """One line of Markdown."""
    cfg = load_config(str(HERE.parent / "configs" / f"{name}.py"), {"train.num_microbatches": str(microbatches)})
    report = preflight(cfg, open_topology(topology), config_name=name)
    bounds, rows = report.roofline, report.collectives
    sent = sum(row.sent_bytes * row.times for row in rows)
    between = sum(row.sent_bytes * row.times for row in rows if not row.is_blocking) / sent
    links, exposed = sum(bounds.links_s.values()), sum(bounds.exposed_s.values())
    return (
        f"| {name} | {topology} | {microbatches} | {report.peak_bytes / 2**30:.1f} GiB "
        f"| {between:.1%} | {1 - exposed / links:.1%} | {links:.2f} s | {exposed:.2f} s | {bounds.at_least_s:.2f} s "
        f"| {bounds.mfu_ceiling:.1%} |\n"
    )


def main() -> None:
    """Writes the table."""
    file = HERE / "scale.md"
    table = HEAD + "".join(table_row(*program) for program in PROGRAMS)
    begin, end = map(re.escape, MARKS)
    text, found = re.subn(f"(?s){begin}.*?{end}", lambda _: MARKS[0] + table + MARKS[1], file.read_text())
    assert found == 1, f"{file} has no place for the table: {MARKS}"
    file.write_text(text)


if __name__ == "__main__":
    main()
