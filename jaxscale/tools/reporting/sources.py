"""Data summary of a run: the data settings as text, and a table of sources with their tokens.

The sources of sequences are not logged, since they can be computed. config.json has the stages of the mixture in
sequences of the stream, and each prefix of a stage differs by less than one sequence from the planned share
(runtime/data/mixture.py). Skipped batches are subtracted.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxscale import units
from jaxscale.runtime.monitor.history import History, is_number
from jaxscale.runtime.monitor.run_files import as_dict, as_list
from jaxscale.tools.reporting.event_text import described, is_pair
from jaxscale.tools.reporting.page_tables import n, run_name, table
from jaxscale.tools.reporting.page_text import escape, percent, plain

UNTOLD = (n("n/a"), n("none"))  # columns with only these cells are omitted
Stage = tuple[float, dict[str, float]]  # (first sequence in the stream, weights)


def data_table(histories: Sequence[History]) -> str:
    """Returns the data settings and the table of sources as HTML, for each run."""
    parts = []
    for place, history in enumerate(histories):
        heading = f"<h3>{run_name(history, place).html}</h3>" if len(histories) > 1 else ""
        parts.append(heading + data_words(history) + source_table(history))
    return "".join(parts)


def data_words(history: History) -> str:
    """Returns the data settings as an HTML paragraph."""
    config, data = history.part("config"), history.part("config", "data")
    parts = []
    if data:
        files = f", files {described(data['files'])}" if data.get("files") else ""
        parts += [f"{data.get('name') or 'data'}{files}", f"packing {data.get('packing')}"]
        if objective := history.part("config", "data", "objective").get("name"):
            parts.append(f"objective {objective}")
        if data.get("tokenizer"):
            parts.append(f"tokenizer {data['tokenizer']}")
    if is_number(config.get("seq_len")):
        parts.append(f"sequence length {config['seq_len']:,}")
    tokens = history.latest("tokens_seen")
    if tokens is not None:
        parts.append(f"{units.count(tokens)} tokens seen ({tokens:,.0f})")
    (steps, unpadded), batches = history.series("train/real_tokens"), history.batches
    if unpadded and batches is not None and (all_tokens := sum(batches.size(step - 1) for step in steps)):
        parts.append(f"{percent(sum(unpadded) / all_tokens)} of them are not padding (in the logged steps)")
    if gated := history.latest("gated_rows_total"):
        parts.append(f"{gated:,.0f} rows gated since the last start")
    if skips := data.get("skip_batches"):
        parts.append(f"skipped by data.skip_batches: {described(skips)}")
    return f"<p>{escape('; '.join(parts))}.</p>" if parts else ""


def source_table(history: History) -> str:
    """Returns a table with one row per source: planned tokens, tokens seen, epochs and losses."""
    data = history.part("config", "data")
    planned = stages_of(data.get("mixture"))
    caps = as_dict(data.get("max_epochs"))
    met = [name.split("/")[1] for name in history.names() if is_of_source(name)]
    sources = list(dict.fromkeys([*(name for weights in planned for name in weights), *met]))
    if not sources:
        return ""
    rows_seen, sizes = rows_by_source(history), history.part("mixture", "rows")
    row_tokens = history.part("config").get("seq_len")
    all_rows = sum(rows_seen.values())
    rows = []
    for name in sources:
        shares = [weights.get(name, 0.0) / (sum(weights.values()) or 1.0) for weights in planned]
        planned_share = ", then ".join(map(percent, dict.fromkeys(shares))) if planned else "n/a"
        seen = rows_seen.get(name, 0.0) if all_rows else None
        tokens = units.count(seen * row_tokens) if seen is not None and is_number(row_tokens) else "n/a"
        epochs = seen / sizes[name] if seen is not None and is_number(sizes.get(name)) and sizes[name] else None
        cap = plain(caps[name]) if is_number(caps.get(name)) else "none"
        rows.append((
            name, n(planned_share), n(tokens),
            n(percent(seen / all_rows) if seen is not None else "n/a"),
            n(plain(epochs and round(epochs, 3))), n(cap), n(plain(history.latest(f"train/{name}/loss"))),
            n(plain(history.latest(f"validation/{name}/bits_per_byte"))),
        ))  # fmt: skip
    head = ("source", "planned share", "tokens seen", "of all", "epochs", "most epochs", "last training loss")
    columns = zip((*head, "held-out bits/byte"), zip(*rows))
    known = [(title, cells) for title, cells in columns if any(cell not in UNTOLD for cell in cells)]
    return table([title for title, _ in known], zip(*(cells for _, cells in known)))


def rows_by_source(history: History) -> dict[str, float]:
    """Returns {source: sequences trained on}, or {} if unknown. The error is at most 1 per stage and skipped range."""
    stages = recorded_stages(history)
    newest = history.latest("batch_index")
    batches = history.batches
    seq_len = history.part("config").get("seq_len")
    if not stages or newest is None or batches is None or not (is_number(seq_len) and seq_len > 0):
        return {}
    row = lambda n: batches.begin(int(n)) / seq_len  # first sequence of batch n
    found: dict[str, float] = {}
    ends = [first for first, _ in stages[1:]] + [float("inf")]
    skips = [*as_list(history.part("config", "data").get("skip_batches"))]  # skips from settings and rewinds
    skips += [part for e in history.events if e["event"] == "rewind" for part in as_list(e.get("skip_batches"))]
    skips = [(int(part[0]), int(part[1])) for part in skips if is_pair(part)]
    for begin, end in trained_ranges(int(newest) + 1, skips):
        for (first, weights), stop in zip(stages, ends):
            rows = max(0.0, min(row(end), stop) - max(row(begin), first))
            for name, weight in weights.items():
                found[name] = found.get(name, 0.0) + rows * weight / sum(weights.values())
    return found


def recorded_stages(history: History) -> list[Stage]:
    """Returns the stages of the mixture in config.json. Older runs have only the stage in their settings."""
    parts = as_list(history.part("mixture").get("stages"))
    pairs = [(part[0], weights_of(part[1])) for part in parts if isinstance(part, list) and len(part) == 2]
    stages = [(float(first), weights) for first, weights in pairs if is_number(first) and weights]
    data = history.part("config", "data")
    planned = stages_of(data.get("mixture"))
    if not stages and len(planned) == 1 and not data.get("max_epochs"):
        stages = [(0.0, weights_of(weights)) for weights in planned if weights_of(weights)]
    return stages


def weights_of(value: Any) -> dict[str, float]:
    """Returns the weights that are above 0."""
    return {str(name): weight for name, weight in as_dict(value).items() if is_number(weight) and weight > 0}


def trained_ranges(stop: int, skips: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the parts of [0, stop) outside the ranges `skips`, in order."""
    found, begin = [], 0
    for first, last in sorted(skips):
        if min(first, stop) > begin:
            found.append((begin, min(first, stop)))
        begin = max(begin, last)
    return [*found, (begin, stop)] if begin < stop else found


def is_of_source(name: str) -> bool:
    """Returns True for metrics of a source, such as 'train/web/loss' and 'validation/web/bits_per_byte'."""
    room, _, suffix = name.partition("/")
    return room in ("train", "validation") and suffix.count("/") == 1


def stages_of(mixture: Any) -> list[dict[str, float]]:
    """Returns the weights of each stage of data.mixture, in order."""
    if not isinstance(mixture, dict) or not mixture:
        return []
    if all(map(is_number, mixture.values())):
        return [mixture]
    stages = [weights for weights in mixture.values() if isinstance(weights, dict)]
    return [{name: weight for name, weight in weights.items() if is_number(weight)} for weights in stages]
