"""Writes report.json, the manifest, and the HTML report of a preparation."""

import contextlib
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

from jaxscale import __version__, schema
from jaxscale.corpus.prepare.config import PrepareConfig
from jaxscale.corpus.prepare.report import report_page
from jaxscale.corpus.prepare.tally import Tally
from jaxscale.data.manifest import NAME as MANIFEST
from jaxscale.data.manifest import write_manifest
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import read_json, write_text_atomic

FACTS, PAGE = "report.json", "report.html"


def write_outcome(
    cfg: PrepareConfig, output: pathlib.Path, names: Sequence[str], tokenizer: str, facts: dict[str, Any]
) -> None:
    """Writes report.json and the manifest beside the shards. facts: tally, clusters, fertility."""
    write_text_atomic(output / FACTS, json.dumps(facts, indent=1, sort_keys=True) + "\n")
    tally = Tally.from_json(facts["tally"])
    write_manifest(
        output,
        names,
        recipe=schema.to_dict(cfg),
        tokenizer_file=None if tokenizer == "bytes" else pathlib.Path(tokenizer),
        source_bytes={name: tally.counts["written", name, "bytes"] for name in cfg.sources},
        versions=versions(),
    )


def rewrite_report(output: pathlib.Path) -> None:
    """Makes report.html out of the manifest and report.json. Raises BadInput where the set is not complete."""
    if not (output / MANIFEST).exists():
        raise BadInput(f"{output} has no {MANIFEST}: no set was completed there; prepare it first")
    facts = read_json(output / FACTS) if (output / FACTS).exists() else None
    if not isinstance(facts, dict) or not facts.keys() >= {"tally", "clusters", "fertility"}:
        raise BadInput(f"{output / FACTS} is not what prepare wrote there; bring it back, or prepare the set again")
    facts |= {"manifest": read_json(output / MANIFEST)}
    write_text_atomic(output / PAGE, report_page(facts))


def versions() -> dict[str, str]:
    """Of the packages that the bytes may depend on, as far as they are there."""
    found = {"jaxscale": __version__, "python": platform.python_version()}
    for name in ("numpy", "pyarrow", "rensa", "py3langid", "tokenizers", "sentencepiece", "rustbpe"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
