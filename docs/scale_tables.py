"""Compiles the programs of docs/scale.md and of the headers of configs/, and writes their tables.

    python docs/scale_tables.py                compiles what is not in preflight's cache; writes scale.json, all tables
    python docs/scale_tables.py v5p v6e:8x8    the same for programs whose names hold one of these words
    python docs/scale_tables.py --write        only writes the tables, from docs/scale.json

Programs for TPUs need libtpu, those for GPUs jax's CUDA plugin; of what is missing the last figures are kept. Headers
have no lines of programs that were not compiled since links are priced by stage.
"""

import concurrent.futures
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "scale.json"
PAGE = ROOT / "docs" / "scale.md"
WORKERS = 2
HEADER = re.compile(r"^Preflight.*?(?=^\"\"\")", re.M | re.S)
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(?=<!-- end -->)", re.S)
TIMES = "minimum step time | exposed | overlapped | maximum MFU | compiled"
MAXTEXT_HEAD = (
    f"| slice, sequences per chip | MaxText peak | jaxscale peak | MaxText bytes | jaxscale bytes | {TIMES} |"
)
LAYOUTS_HEAD = f"| mesh, model, machine | chips | peak memory per chip | sent per chip and step | {TIMES} |"
GROWTH_HEAD = f"| slice | chips | peak memory per chip | sent per chip and step | {TIMES} |"
RULE = "|---" * 10 + "|"
Kept = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Row:
    """A program: a config on a topology, with settings of its own."""

    table: str  # 'configs', 'maxtext', 'growth' or 'layouts'
    config: str
    topology: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""  # the settings in words; in 'maxtext' the row's name and MaxText's figures, in 'layouts' the name

    @property
    def name(self) -> str:
        """'configs 7b v5p:2x2x4'."""
        return " ".join(filter(None, (self.table, self.config, self.topology, self.note.split("|")[0].strip())))


PARTS = "train.num_microbatches"
MAXTEXT = {"model.vocab_size": 32_000, "train.reduce_dtype": "bfloat16", PARTS: 1}
SAVED = {"model.remat": "save", "model.remat_save": "('query','key','value')"}
PRODUCTS = SAVED | {"model.remat_save": "('query','key','value','attention_added','mlp_gate','mlp_up')"}
LARGE = MAXTEXT | PRODUCTS | {"batch_tokens": "64 rows", "model.row_parts": 2}
BESIDE = {  # lets v5e's scatters run beside products; libtpu 0.0.51 fails with it on 16x16, so that it is no default
    "compiler": '{"xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": true, '
    '"xla_enable_async_reduce_scatter_fusion": true, "xla_tpu_enable_ici_rs_pipelining": true}'
}
STAGES, COPIES = "mesh.pipeline", "mesh.fsdp"
GROWTH = (("v5p:2x2x4", 16), ("v5p:4x4x4", 64), ("v5p:8x8x8", 512), ("v5p:8x16x16", 2048), ("v5p:16x16x24", 6144))
ROWS = (
    Row("configs", "1b", "v5e:4x4", {PARTS: 8}, "8 microbatches"),
    Row("configs", "7b", "v5p:2x2x4", {PARTS: 16}, "16 microbatches"),
    Row("configs", "7b", "v5p:8x8x16"),
    Row("configs", "7b", "v5e:16x16"),
    Row("configs", "7b", "v6e:8x8", {PARTS: 2}, "2 microbatches"),
    Row("configs", "7b", "v6e:16x16"),
    Row("configs", "7b", "tpu7x:2x2x4"),
    Row("configs", "7b", "h100:1x8", {PARTS: 32}, "32 microbatches"),
    Row("configs", "7b", "h100:8x8", {PARTS: 4}, "4 microbatches"),
    Row("configs", "13b", "v5p:8x8x8"),
    Row("configs", "13b", "4*v6e:16x16", {"mesh.data": 4}, "data=4"),
    Row("configs", "70b", "v5p:8x8x8"),
    Row("configs", "70b", "4*v6e:16x16", {"mesh.data": 4}, "data=4"),
    Row("configs", "70b", "a100:32x8", {PARTS: 2, "mesh.tensor": 8}, "2 microbatches, tensor=8"),
    Row("configs", "llama3_8b", "v5p:2x2x2"),
    Row("configs", "qwen3_8b", "v5p:2x2x2"),
    Row("configs", "gemma3_4b", "v5p:2x2x2"),
    Row("maxtext", "7b", "v5p:2x2x4", LARGE, "4 x 4096, matmuls saved | 52.1 GiB | 42.4 GB"),
    Row("maxtext", "7b", "v5p:2x2x4", LARGE | {"mesh.fsdp": 4, "mesh.tensor": 4, "model.row_parts": 4},
        "fsdp 4 x tensor 4 | 53.6 GiB | 183.9 GB"),
    Row("maxtext", "7b", "v5e:8x8", MAXTEXT | SAVED | BESIDE | {"seq_len": 2048, "batch_tokens": "256 rows"},
        "4 x 2048, q k v saved | 11.27 GiB | 39.9 GB (52.6 sent)"),
    Row("maxtext", "7b", "v6e:8x8", MAXTEXT | {"batch_tokens": "768 rows", "model.row_parts": 4},
        "12 x 4096, remat full | 24.5 GiB | 39.9 GB (52.6 sent)"),
    *(Row("growth", "7b", name, {"batch_tokens": f"{chips} rows", "mesh.fsdp": min(chips, 64), "mesh.data": -1})
      for name, chips in GROWTH),
    # three layouts that are often named as examples: copies x tensor x stages; the copies share their state (fsdp)
    Row("layouts", "70b", "v5p:16x16x16", {STAGES: 4, COPIES: 128, "mesh.tensor": 8, PARTS: 8, "pipeline.chunks": 5},
        "128 x 8 x 4"),
    Row("layouts", "405b", "v5p:8x8x16", {STAGES: 8, COPIES: 16, PARTS: 64}, "16 x 8 x 8"),
    Row("layouts", "70b", "h100:32x8",
        {STAGES: 4, COPIES: 8, "mesh.tensor": 8, PARTS: 64, "pipeline.head": "whole"}, "8 x 8 x 4"),
)  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Compiles and writes."""
    kept: Kept = json.loads(KEPT.read_text())
    if "--write" not in arguments:
        rows = [row for row in ROWS if not arguments or any(word in row.name for word in arguments)]
        with concurrent.futures.ProcessPoolExecutor(WORKERS, max_tasks_per_child=1) as pool:
            for row, found in zip(rows, pool.map(compiled, rows)):
                print(f"{row.name}: {found if isinstance(found, str) else line_of(found)}", flush=True)
                if not isinstance(found, str):
                    kept[row.name] = found
                    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(TABLE.sub(lambda found: found[1] + table(found[2], kept), PAGE.read_text()))
    for config in sorted({row.config for row in ROWS if row.table == "configs"}):
        file = ROOT / "configs" / f"{config}.py"
        file.write_text(HEADER.sub(lambda _, config=config: header(config, kept), file.read_text(), count=1))


def compiled(row: Row) -> dict[str, Any] | str:
    """What preflight says of a program, or one line of why it says nothing."""
    from jaxscale.settings import config_file
    from jaxscale.system.exits import BadInput
    from jaxscale.tools.planning.topology import open_topology
    from jaxscale.tools.preflight.preflight import preflight
    from jaxscale.tools.preflight.step_report import overlap

    try:
        settings = {name: str(value) for name, value in row.settings.items()}
        cfg = config_file.load_config(str(ROOT / "configs" / f"{row.config}.py"), settings)
        report = preflight(cfg, open_topology(row.topology), config_name=row.config, say=lambda *_: None)
    except BadInput as error:
        return str(error)
    if not report.fits or report.roofline is None:
        return f"does not fit: {report.peak_bytes} bytes at the peak"
    line = report.roofline
    return {
        "chips": report.num_devices,
        "peak_gib": round(report.peak_bytes / 2**30, 3),
        "sent_gb": round(sum(one.fast_bytes for one in report.traffic) / 1e9, 2),
        "dcn_gb": round(sum(one.slow_bytes for one in report.traffic) / 1e9, 2),
        "at_least_s": line.at_least_s,
        "exposed_s": sum(line.exposed_s.values()),
        "covered": overlap(report.collectives)[1],
        "links_s": sum(line.links_s.values()),
        "mfu_at_most": line.mfu_ceiling,
        "compile_seconds": round(report.compile_seconds, 1),
        "versions": report.versions,
        "date": report.date,
    }


def line_of(found: Mapping[str, Any]) -> str:
    """'9.1 GiB; 0.50 s, 0.02 s exposed; 76%; 55 GB', as the header's first line says."""
    dcn = f" + {found['dcn_gb']:.1f} GB DCN" if found["dcn_gb"] else " GB"
    times = f"{found['at_least_s']:.2f} s, {found['exposed_s']:.2f} s exposed"
    return f"{found['peak_gib']:.1f} GiB; {times}; {found['mfu_at_most']:.0%}; {found['sent_gb']:,.0f}{dcn}"


def header(config: str, kept: Kept) -> str:
    """The end of a config's docstring: a line for each of its programs, with the versions they were compiled by."""
    rows = [row for row in ROWS if row.table == "configs" and row.config == config and is_new(row, kept)]
    if not rows:
        name = next(row.topology for row in ROWS if row.config == config)
        return f"Preflight: jaxscale preflight --config=configs/{config}.py --topology='{name}'\n"
    dates = sorted({f"{kept[row.name]['date']}, {versions(kept[row.name])}" for row in rows})
    lines = ["Preflight, remat full: peak memory per chip; minimum step time, exposed part; maximum MFU; sent"]
    covered = {date for date in dates for longer in dates if longer.startswith(f"{date}, ")}  # GPU rows have no libtpu
    lines += [f"({date})" for date in dates if date not in covered]
    for row in rows:
        lines.append(f"    {row.topology}{f' ({row.note})' if row.note else ''}: {line_of(kept[row.name])}")
    return "\n".join(lines) + "\n"


def is_new(row: Row, kept: Kept) -> bool:
    """True if its time is known with what is exposed."""
    return "at_least_s" in kept.get(row.name, {})


def versions(found: Mapping[str, Any]) -> str:
    """'jax 0.12.0.1, libtpu 0.0.51'."""
    wanted = [name for name in ("jax", "libtpu") if name in found["versions"]]
    return ", ".join(f"{name} {found['versions'][name]}" for name in wanted)


def table(name: str, kept: Kept) -> str:
    """A table of docs/scale.md. Cells of programs that were not compiled since are empty."""
    rows = [(row, kept.get(row.name, {})) for row in ROWS if row.table == name]
    cell = lambda found, key, form, unit="": f"{form.format(found[key])}{unit}" if key in found else ""
    of = {
        "peak": lambda found: cell(found, "peak_gib", "{:.2f}", " GiB"),
        "sent": lambda found: cell(found, "sent_gb", "{:,.1f}", " GB"),
        "least": lambda found: cell(found, "at_least_s", "{:.3f}", " s"),
        "exposed": lambda found: cell(found, "exposed_s", "{:.3f}", " s"),
        "covered": lambda found: cell(found, "covered", "{:.1%}"),
        "mfu": lambda found: cell(found, "mfu_at_most", "{:.1%}"),
    }
    if name == "maxtext":
        lines = [MAXTEXT_HEAD, RULE]
        for row, found in rows:
            what, peak, sent = (part.strip() for part in row.note.split("|"))
            ours = [of[key](found) for key in ("peak", "sent", "least", "exposed", "covered", "mfu")]
            cells = [f"{row.topology}, {what}", peak, ours[0], sent, *ours[1:], found.get("date", "")]
            lines.append(f"| {' | '.join(cells)} |")
    else:
        lines = [LAYOUTS_HEAD if name == "layouts" else GROWTH_HEAD, "|---" * 9 + "|"]
        for row, found in rows:
            what = f"{row.note}, `{row.config}`, {row.topology}" if name == "layouts" else row.topology
            chips = cell(found, "chips", "{:,}")
            ours = [of[key](found) for key in ("peak", "sent", "least", "exposed", "covered", "mfu")]
            lines.append(f"| {what} | {chips} | {' | '.join([*ours, found.get('date', '')])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
