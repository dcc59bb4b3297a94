"""The table of chips that MFU, plans and rooflines are against, from jaxscale/kernels/hardware.py."""

from generators.words import code, escaped, table
from jaxscale.kernels.hardware import CHIPS, Chip

HEAD = """# Chips

Figures of one JAX device; peaks are dense bfloat16 (float16 for cards without it), links one direction. An empty cell:
no source was found. Prices are list prices on their date, a default for `jaxscale plan --price`.

"""


def pages() -> dict[str, str]:
    """{file: Markdown}."""
    head = [
        "chip",
        "JAX calls it",
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
    """Where its figures come from."""
    return [chip.source, chip.links_source, chip.watts_source, chip.price.source if chip.price else ""]
