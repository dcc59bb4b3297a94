"""HTML report of a preparation, as one self-contained page without scripts, with warnings about the result."""

import collections
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxscale import schema, units
from jaxscale.runtime.data.manifest import NAME as MANIFEST
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import read_json, write_text_atomic
from jaxscale.system.redact import in_html
from jaxscale.tools.corpus.curate.config import ContaminationConfig, NearConfig
from jaxscale.tools.corpus.curate.duplicates import detection_table
from jaxscale.tools.corpus.prepare.config import RecipeReadConfig
from jaxscale.tools.corpus.prepare.tally import SCORE_BINS, Tally
from jaxscale.tools.corpus.prepare.tokens import FertilityRow

FACTS, PAGE = "report.json", "report.html"

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem;border-bottom:1px solid #d5dae0}
table{border-collapse:collapse;margin:.6rem 0}td,th{padding:.2rem .7rem;text-align:right;
border-bottom:1px solid #e8ebef}
td:first-child,th:first-child,td.t{text-align:left}th{color:#57606a;font-weight:600}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f6f8fa;padding:.6rem;border-radius:4px;max-height:16rem;
overflow:auto;font-size:12.5px}summary{cursor:pointer}.warn{background:#fff4dc;padding:.4rem .8rem;border-left:4px solid
#d99a1c;margin:.4rem 0}.bar{fill:#3b77c2}.muted{color:#57606a}svg text{font:11px system-ui,sans-serif;fill:#57606a}
"""
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # browsers neither run nor load anything for this page
MOST_LANGUAGES = 8  # maximum number of languages in a message
WHERE = RecipeReadConfig.where
MOST_ROWS = 40  # maximum number of rows in a table; the remaining rows are summed
# Heuristics of this project without a published source. Each only suggests a check.
LARGE_SOURCE = 0.8  # fraction of all tokens, if there are several sources
LOW_RETENTION, HIGH_RETENTION = 0.05, 0.98
MANY_DUPLICATES = 0.3
LARGE_SYNTHETIC = 0.5
FEW_BYTES_PER_TOKEN = 2.0  # English text has about 4.4 with 32K ids
QUALITY = ("gopher_quality", "gopher_repetition", "c4", "fineweb", "classifier")
MISSING = (  # groups of stages, and the warning if no stage of the group runs
    (("language",), "no language identification: text in all languages is kept"),
    (QUALITY, "no quality filter: boilerplate, spam and lists are kept"),
    (("exact_dedup", "near_dedup"), "no deduplication: models memorize repeated text, and token counts are inflated"),
    (("decontaminate",), "no decontamination: evaluation items may be in the training text"),
    (("pii",), "no stage for personal data: it is neither redacted nor dropped"),
    (("toxicity",), "no toxicity scores"),
)


def rewrite_report(output: pathlib.Path) -> None:
    """Writes report.html from the manifest and report.json. Raises BadInput if the dataset is not complete."""
    if not (output / MANIFEST).exists():
        raise BadInput(f"{output} has no {MANIFEST}, so it is not a complete dataset; prepare it first")
    write_text_atomic(output / PAGE, report_page(read_facts(output) | {"manifest": read_json(output / MANIFEST)}))


def read_facts(output: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of report.json. Raises BadInput if the file is missing or prepare did not write it."""
    facts = read_json(output / FACTS) if (output / FACTS).exists() else None
    if not isinstance(facts, dict) or not facts.keys() >= {"tally", "clusters", "fertility"}:
        raise BadInput(f"{output / FACTS} is missing or invalid; restore it, or prepare the dataset again")
    return facts


def report_page(facts: Mapping[str, Any]) -> str:
    """Returns the HTML page. facts: contents of report.json, and of the manifest under the key 'manifest'."""
    tally, manifest = Tally.from_json(facts["tally"]), facts["manifest"]
    warnings = "".join(f'<div class="warn">{escape(line)}</div>' for line in find_warnings(tally, manifest, facts))
    reading = [(key[1], key[2], n) for key, n in sorted(tally.counts.items()) if key[0] == "read"]
    lengths = sorted((int(power), n) for power, n in tally.sums("length", by=2).items())
    languages = {name or "not identified": n for name, n in tally.sums("language", by=2).items()}
    hits = largest_first(tally.sums("detail", "decontaminate", by=3))
    sections = [
        f"<h1>Data report</h1>{summary_table(manifest, tally)}",
        section("Warnings", warnings or "<p>None.</p>"),
        section("Funnel", funnel_table(tally, manifest["recipe"]["stages"])),
        section("Dropped documents", reasons_and_samples(tally, "dropped")),
        section("Edited documents", reasons_and_samples(tally, "edited")),
        section("Skipped or repaired while reading", table(("source", "kind", "count"), reading)),
        section("Document lengths, as read", bars([(f"under {units.size(2**power)}", n) for power, n in lengths])),
        section("Languages kept", bars(largest_first(languages))),
        section("Languages dropped", bars(largest_first(tally.sums("detail", "language", by=3)))),
        *(section(f"Duplicate groups: {escape(join['name'])}", clusters(join)) for join in facts["clusters"]),
        section("Detection probability of near duplicates", detection(manifest["recipe"])),
        section("Classifier: documents above each threshold", classifier_tables(tally, facts.get("classifier"))),
        section("Evaluation items found", table(("item", "documents"), hits)),
        section("Tokenizer, by source and language", fertility_table(facts["fertility"])),
    ]
    body = "\n".join(filter(None, sections))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
        f"<title>Data report</title><style>{STYLE}</style><body>{body}</body></html>\n"
    )


def escape(value: Any) -> str:
    """Returns the value as HTML text, with secrets removed. Unprintable and bidirectional characters become U+FFFD."""
    return in_html("".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in str(value)))


def section(title: str, body: str) -> str:
    """Returns a section with a title, or '' if the body is empty."""
    return f"<h2>{title}</h2>{body}" if body else ""


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns an HTML table with escaped cells, or '' without rows. Numbers are aligned to the right."""

    def cell(tag: str, value: Any) -> str:
        text = f"{value:,}" if isinstance(value, int) else escape(value)
        side = "" if text[:1].isdigit() or text in ("-", "") or tag == "th" else ' class="t"'
        return f"<{tag}{side}>{text}</{tag}>"

    line = lambda tag, row: "<tr>" + "".join(cell(tag, value) for value in row) + "</tr>"
    return "<table>" + line("th", header) + "".join(line("td", row) for row in rows) + "</table>" if rows else ""


def share(part: float, whole: float) -> str:
    """Returns a percentage such as '3.1%', or '-' if `whole` is 0."""
    return f"{part / whole:.1%}" if whole else "-"


def summary_table(manifest: Mapping[str, Any], tally: Tally) -> str:
    """Returns a table of the main numbers of the dataset."""
    read, lost = tally.total("in", "read"), tally.left_out(WHERE)
    documents, tokens = manifest["num_documents"], manifest["num_tokens"]
    skipped = f"; {lost.documents:,} more were skipped while reading" if lost else ""
    rows = [
        ("documents", f"{documents:,} of {read:,} read ({share(documents, read)}){skipped}"),
        ("tokens", f"{tokens:,} ({units.count(tokens)}), including end tokens"),
        ("text", units.size(manifest["text_bytes"])),
        ("shards", f"{len(manifest['shards']):,}"),
        ("tokenizer", f"{manifest['tokenizer']['name']}, {manifest['tokenizer']['vocab_size']:,} ids"),
        ("fingerprint", manifest["fingerprint"]),
    ]
    return table(("", ""), rows)


def funnel_table(tally: Tally, stages: Sequence[str]) -> str:
    """Returns a table of documents and bytes before and after each stage, by source."""
    sources = sorted({key[2] for key in tally.counts if key[:2] == ("in", "read")})
    rows: list[tuple] = []
    for source in sources:
        number = tally.counts["in", "read", source, "documents"]
        rows.append((source, "read", "", number, units.size(tally.counts["in", "read", source, "bytes"]), ""))
        for stage in stages:
            before = tally.counts["in", stage, source, "documents"]
            after = tally.counts["out", stage, source, "documents"]
            size = tally.counts["out", stage, source, "bytes"]
            if before:
                rows.append(("", stage, before, after, units.size(size), share(before - after, before)))
    return table(("source", "stage", "documents in", "out", "text out", "dropped"), rows)


def reasons_and_samples(tally: Tally, kind: str) -> str:
    """Returns the number of documents by reason and source, with samples. kind: 'dropped' or 'edited'."""
    reasons: dict[tuple[str, str], collections.Counter] = collections.defaultdict(collections.Counter)
    for key, n in tally.counts.items():
        if key[0] == kind and key[-1] == "documents":
            reasons[key[1], key[3]][key[2]] += n
    parts = []
    for (stage, reason), by_source in sorted(reasons.items(), key=lambda item: (-item[1].total(), item[0])):
        where = ", ".join(f"{escape(source)} {n:,}" for source, n in sorted(by_source.items()))
        parts.append(
            f"<details><summary><b>{escape(stage)}</b>: {escape(reason)} - {by_source.total():,} documents "
            f'<span class="muted">({where})</span></summary>'
        )
        for sample in tally.samples.get((stage, reason), ()):
            parts.append(f'<p class="muted">{escape(sample.source)}: {escape(sample.file)} at {sample.offset:,}</p>')
            parts.append(f"<pre>{escape(sample.before)}</pre>")
            parts.append("" if sample.after is None else f"<p>became</p><pre>{escape(sample.after)}</pre>")
        parts.append("</details>")
    return "".join(parts)


def bars(rows: Sequence[tuple[str, int]]) -> str:
    """Returns an SVG with a horizontal bar for each (label, number), or '' without rows."""
    if not rows:
        return ""
    most, lines = max(n for _, n in rows), []
    for i, (label, n) in enumerate(rows):
        y, width = 20 * i, max(1, round(500 * n / most))
        lines.append(f'<text x="150" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        lines.append(f'<rect class="bar" x="158" y="{y + 3}" width="{width}" height="14"/>')
        lines.append(f'<text x="{164 + width}" y="{y + 14}">{n:,}</text>')
    return f'<svg width="760" height="{20 * len(rows) + 4}" role="img">{"".join(lines)}</svg>'


def largest_first(numbers: Mapping[str, int]) -> list[tuple[str, int]]:
    """Returns the MOST_ROWS largest numbers in descending order, and the sum of the others as an additional row."""
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    remaining = sum(n for _, n in ordered[MOST_ROWS:])
    return ordered[:MOST_ROWS] + ([(f"{len(ordered) - MOST_ROWS:,} others", remaining)] if remaining else [])


def clusters(join: Mapping[str, Any]) -> str:
    """Returns a histogram of the sizes of duplicate groups, and the largest groups."""
    parts = [bars([(f"{size} documents", number) for size, number in join["sizes"]]) or "<p>None.</p>"]
    for group in join["largest"]:
        where = f"{escape(group['file'])} at {group['offset']:,}"
        text = f"<pre>{escape(group['text'])}</pre>"
        parts.append(f"<details><summary>{group['size']:,} documents; kept: {where}</summary>{text}</details>")
    return "".join(parts)


def detection(recipe: Mapping[str, Any]) -> str:
    """Returns a table of the probability that a near duplicate is dropped, by similarity, for the recipe's settings."""
    if "near_dedup" not in recipe["stages"]:
        return ""
    cfg = schema.from_dict(NearConfig, recipe["near_dedup"])
    shown = [
        (f"{jaccard:.2f}", f"{found:.3f}", f"{found * passed:.3f}") for jaccard, found, passed in detection_table(cfg)
    ]
    head = ("Jaccard similarity", "probability of a candidate", "probability of being dropped")
    return f"<p>{threshold_sentence(cfg)}</p>{table(head, shown)}"


def threshold_sentence(cfg: NearConfig) -> str:
    """Returns a sentence that explains the near-duplicate threshold for two texts of equal length.

    If each word differs with probability p, two texts share an n-gram with probability (1 - p)^n. If one text lacks a
    passage with a fraction q of the words of the other text, the similarity is 1 - q.
    """
    shared = 2 * cfg.threshold / (1 + cfg.threshold)
    changed = 1 - shared ** (1 / cfg.ngram_words)
    return (
        f"threshold={cfg.threshold:g} for {cfg.ngram_words}-grams of words: a document is a near duplicate of another "
        f"document if at most about {changed:.1%} of its words differ at random positions, or if it lacks one passage "
        f"of at most about {1 - cfg.threshold:.0%} of the other document."
    )


def classifier_tables(tally: Tally, model: Mapping[str, Any] | None) -> str:
    """Returns a table of documents and held-out examples by minimum classifier score, and a histogram of scores."""
    bins = {int(place): n for place, n in tally.sums("score", "classifier", by=3).items()}
    if not bins:
        return ""
    holdout_shares = {round(SCORE_BINS * least): (good, bad) for least, good, bad in (model["kept"] if model else ())}
    total, rows = sum(bins.values()), []
    for least in range(1, SCORE_BINS):
        passing = sum(n for place, n in bins.items() if place >= least)
        shares = [f"{value:.1%}" for value in holdout_shares.get(least, ())]
        rows.append((f"{least / SCORE_BINS:.2f}", f"{passing:,} ({share(passing, total)})", *shares))
    head = ("score at least", "documents", *(("good examples", "bad examples") if model else ()))
    intro = "" if not model else (
        f"<p>Trained on {model['good']:,} good and {model['bad']:,} bad examples, of which "
        f"{model['held_out'][0]:,} and {model['held_out'][1]:,} were held out. On held-out examples: "
        f"{model['accuracy']:.1%} balanced accuracy at threshold 0.5, ROC AUC {model['auc']:.3f}.</p>"
    )  # fmt: skip
    ordered = [(f"{place / SCORE_BINS:.2f} to {(place + 1) / SCORE_BINS:.2f}", n) for place, n in sorted(bins.items())]
    return f"{intro}{table(head, rows)}<h3>Scores</h3>{bars(ordered)}"


def fertility_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of tokenizer fertility by source and language."""
    plain = lambda value: "-" if value is None else f"{value:.3f}" if isinstance(value, float) else value
    shown = [[plain(row[name]) for name in FertilityRow._fields] for row in rows[:MOST_ROWS]]
    return table([name.replace("_", " ") for name in FertilityRow._fields], shown)


def find_warnings(tally: Tally, manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Returns the warnings, one line each."""
    stages = manifest["recipe"]["stages"]
    lost = tally.left_out(WHERE)
    lines = [lost.line] if lost and lost.is_much else []
    lines += [tally.loss.line("the tokenizer")] if tally.loss.is_much else []
    lines += [text for names, text in MISSING if not set(names) & set(stages)]
    decontaminate = schema.from_dict(ContaminationConfig, manifest["recipe"].get("decontaminate", {}))
    lines += evaluation_warnings(decontaminate, facts.get("evaluation"))
    lines += [*retention_warnings(tally, manifest), *source_warnings(manifest)]
    for row in facts.get("fertility", ()):
        if row["source"] != "all" and (row["bytes_per_token"] or 9) < FEW_BYTES_PER_TOKEN and row["documents"] >= 10:
            what = f"{row['source']} in {row['language'] or 'unknown language'}"
            lines.append(
                f"the tokenizer has {row['bytes_per_token']:.2f} bytes per token for {what}; sequences have little text"
            )
    return lines


def evaluation_warnings(cfg: ContaminationConfig, item_counts: Mapping[str, int] | None) -> list[str]:
    """Returns warnings about evaluation items. item_counts: from count_items, or None without decontamination."""
    if item_counts is not None and not cfg.is_named:
        return ["decontaminate.files has no evaluation items, so nothing was searched for"]
    if item_counts is None or not item_counts["too_short"]:
        return []
    least = min(cfg.ngram_words, cfg.short_words or cfg.ngram_words)
    return [
        f"{item_counts['too_short']:,} of {item_counts['items']:,} evaluation items are too short to search for: "
        f"none of their texts has {least} words"
    ]


def retention_warnings(tally: Tally, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields warnings about the share of documents kept, languages, duplicates and evaluation items."""
    read = tally.total("in", "read")
    share_saved = manifest["num_documents"] / read if read else 1.0
    if share_saved < LOW_RETENTION:
        yield f"only {share_saved:.1%} of the documents are kept; check the largest drops below"
    if share_saved > HIGH_RETENTION and len(manifest["recipe"]["stages"]) > 1:
        yield f"{share_saved:.1%} of the documents are kept: the text was already clean, or the stages do not match it"
    if languages := tally.sums("detail", "language", by=3):
        listed = ", ".join(f"{name} {n:,}" for name, n in largest_first(languages)[:MOST_LANGUAGES])
        yield f"documents dropped by language: {listed}; set language.keep to keep a language"
    for join in ("exact_dedup", "near_dedup"):
        before, after = tally.total("in", join), tally.total("out", join)
        if before and 1 - after / before > MANY_DUPLICATES:
            yield f"{1 - after / before:.0%} of the documents before {join} were duplicates"
    if hits := tally.total("dropped", "decontaminate") + tally.total("edited", "decontaminate"):
        yield f"{hits:,} documents had text of evaluation items, listed below"
    languages = tally.sums("language", by=2)
    if "language" in manifest["recipe"]["stages"] and languages[""]:
        yield f"the language of {languages['']:,} of {languages.total():,} kept documents is unknown"


def source_warnings(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields warnings about proportions and licences of the sources."""
    sources, tokens = manifest["recipe"]["sources"], manifest["num_tokens"]
    for name, source in manifest["sources"].items():
        if len(sources) > 1 and source["tokens"] > LARGE_SOURCE * tokens:
            yield f"{name} has {source['tokens'] / tokens:.0%} of all tokens and will dominate training"
        if not source["documents"]:
            yield f"no documents of {name} are left"
        if not sources[name]["licence"]:
            yield f"no licence is recorded for {name}; set sources.{name}.licence"
    synthetic = sum(manifest["sources"][name]["tokens"] for name, source in sources.items() if source["synthetic"])
    if tokens and synthetic > LARGE_SYNTHETIC * tokens:
        yield f"{synthetic / tokens:.0%} of the tokens are marked as synthetic"
