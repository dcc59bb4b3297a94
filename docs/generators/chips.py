"""The table of chips used for MFU, plans and rooflines, from jaxscale/kernels/hardware.py."""

from generators.words import code, escaped, table
from jaxscale.kernels.hardware import CHIPS, Chip

HEAD = """# Chips

Specifications per JAX device. Peaks are for dense bfloat16, or float16 on GPUs without bfloat16. Link bandwidths are
for one direction. An empty cell means that no source was found. Prices are list prices with their date, and the
default of `jaxscale plan --price`.

"""


def pages() -> dict[str, str]:
    """{file: Markdown}."""
    head = [
        "chip",
        "`device_kind` in JAX",
        "TFLOP/s",
        "memory GB",
        "memory GB/s",
        "fast links GB/s",
        "network GB/s",
        "$/chip-hour",
    ]
    sources = [[chip.name, escaped("; ".join(filter(None, sources_of(chip))))] for chip in CHIPS.values()]
    rows = [row(kind, chip) for kind, chip in CHIPS.items()]
    return {"chips.md": HEAD + table(head, rows) + "\n## Sources\n\n" + table(["chip", "source"], sources)}


def row(kind: str, chip: Chip) -> list[str]:
    """A chip's cells."""
    giga = lambda value: "" if value is None else f"{value / 1e9:,.4g}"
    price = f"{chip.price.dollars_per_hour:.2f} ({chip.price.date})" if chip.price else ""
    return [
        chip.name, code(kind), f"{chip.peak_flops / 1e12:,.4g}", giga(chip.hbm_bytes), giga(chip.hbm_bandwidth),
        giga(chip.ici_bandwidth), giga(chip.dcn_bandwidth), price,
    ]  # fmt: skip


def sources_of(chip: Chip) -> list[str]:
    """Returns the sources of its specifications."""
    return [chip.source, chip.links_source, chip.watts_source, chip.price.source if chip.price else ""]
