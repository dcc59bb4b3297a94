"""The tables of compiled programs are those of docs/scale.json."""

import importlib.util
import json
import pathlib

import pytest

from jaxscale.settings import config_file

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("scale_tables", ROOT / "docs" / "scale_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_and_header_is_as_the_kept_figures_make_it(tables):
    kept = json.loads(tables.KEPT.read_text())
    page = tables.PAGE.read_text()
    names = [found[2] for found in tables.TABLE.finditer(page)]
    assert names == ["maxtext", "growth", "layouts"]
    assert tables.TABLE.sub(lambda found: found[1] + tables.table(found[2], kept), page) == page
    for config in {row.config for row in tables.ROWS if row.table == "configs"}:
        assert tables.header(config, kept) in (ROOT / "configs" / f"{config}.py").read_text()
    assert set(kept) <= {row.name for row in tables.ROWS}  # a row that is gone takes its figures with it


def test_every_row_is_a_config_that_can_be_read(tables):
    for row in tables.ROWS:
        settings = {name: str(value) for name, value in row.settings.items()}
        assert config_file.load_config(str(ROOT / "configs" / f"{row.config}.py"), settings).rows_per_step
    assert len({row.name for row in tables.ROWS}) == len(tables.ROWS)


def test_a_header_has_a_line_for_each_program_that_was_compiled(tables):
    row = next(row for row in tables.ROWS if row.name == "configs 7b h100:8x8 4 microbatches")
    found = {"peak_gib": 15.52, "sent_gb": 104.4, "dcn_gb": 106.0, "at_least_s": 3.934, "exposed_s": 0.5,
             "mfu_at_most": 0.716, "versions": {"jax": "0.10.2"}, "date": "2026-11-23"}  # fmt: skip
    assert tables.header("7b", {row.name: found}).splitlines() == [
        "Preflight, remat full: peak memory per chip; minimum step time, exposed part; maximum MFU; sent",
        "(2026-11-23, jax 0.10.2)",
        "    h100:8x8 (4 microbatches): 15.5 GiB; 3.93 s, 0.50 s exposed; 72%; 104 + 106.0 GB DCN",
    ]
    assert tables.header("7b", {}).startswith("Preflight: jaxscale preflight --config=configs/7b.py")
