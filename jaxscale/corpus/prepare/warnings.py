"""Warnings in the report of a preparation: what to look at before training on the result."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxscale.corpus.prepare.tally import Tally

# Rules of thumb of this project, not of a paper: each only asks for a look.
LARGE_SOURCE = 0.8  # of all tokens, where there are several sources
FEW_KEPT, NEARLY_ALL_KEPT = 0.05, 0.98
MANY_DUPLICATES = 0.3
LARGE_SYNTHETIC = 0.5
FEW_BYTES_PER_TOKEN = 2.0  # English text has about 4.4 with 32K ids
QUALITY = ("gopher_quality", "gopher_repetition", "c4", "fineweb")
MISSING = (  # stages of which one should be there, and what goes unchecked without
    (("language",), "languages are not identified: text in any language is kept"),
    (QUALITY, "no quality rules: boilerplate, spam and lists are kept"),
    (("exact_dedup", "near_dedup"), "no deduplication: repeated text is learned by heart, and inflates token counts"),
    (("decontaminate",), "no decontamination: evaluation items may be in the training text"),
    (("pii",), "personal data are neither redacted nor dropped"),
    (("toxicity",), "toxicity is not measured"),
)


def find_warnings(tally: Tally, manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """One line for each thing."""
    stages = manifest["recipe"]["stages"]
    lines = [text for names, text in MISSING if not set(names) & set(stages)]
    return [*lines, *kept_lines(tally, manifest), *source_lines(manifest), *tokenizer_lines(facts)]


def kept_lines(tally: Tally, manifest: Mapping[str, Any]) -> Iterator[str]:
    """How much was kept, and what is known of it."""
    read = tally.total("in", "read")
    kept = manifest["num_documents"] / read if read else 1.0
    if kept < FEW_KEPT:
        yield f"only {kept:.1%} of the documents are kept; look at the largest drops below"
    if kept > NEARLY_ALL_KEPT and len(manifest["recipe"]["stages"]) > 1:
        yield f"{kept:.1%} of the documents are kept: the text was clean already, or the rules do not touch it"
    for join in ("exact_dedup", "near_dedup"):
        before, after = tally.total("in", join), tally.total("out", join)
        if before and 1 - after / before > MANY_DUPLICATES:
            yield f"{1 - after / before:.0%} of the documents before {join} were duplicates"
    if hits := tally.total("dropped", "decontaminate") + tally.total("edited", "decontaminate"):
        yield f"{hits:,} documents held text of evaluation items; the list is below"
    unknown = sum(n for key, n in tally.counts.items() if key[0] == "language" and not key[2])
    total = sum(n for key, n in tally.counts.items() if key[0] == "language")
    if "language" in manifest["recipe"]["stages"] and unknown:
        yield f"the language of {unknown:,} of {total:,} kept documents is not known"


def source_lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Proportions and licences of the sources."""
    told, tokens = manifest["recipe"]["sources"], manifest["num_tokens"]
    for name, source in manifest["sources"].items():
        if len(told) > 1 and source["tokens"] > LARGE_SOURCE * tokens:
            yield f"{name} has {source['tokens'] / tokens:.0%} of all tokens: what it is like, the model will be like"
        if not source["documents"]:
            yield f"nothing of {name} is left"
        if not told[name]["licence"]:
            yield f"no licence is recorded for {name}; set sources.{name}.licence"
    synthetic = sum(manifest["sources"][name]["tokens"] for name, source in told.items() if source["synthetic"])
    if tokens and synthetic > LARGE_SYNTHETIC * tokens:
        yield f"{synthetic / tokens:.0%} of the tokens are marked as synthetic"


def tokenizer_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Where the tokenizer does badly."""
    for row in facts.get("fertility", ()):
        if row["source"] != "all" and (row["bytes_per_token"] or 9) < FEW_BYTES_PER_TOKEN and row["documents"] >= 10:
            what = f"{row['source']} in {row['language'] or 'unknown language'}"
            yield f"the tokenizer has {row['bytes_per_token']:.2f} bytes a token for {what}: rows hold little text"
