"""Passes end where documents must be compared; counts add up; a report shows text without running it."""

import html.parser
import io
import json
import multiprocessing
import time

import pytest

from jaxscale.runtime.text.document import Document, Outcome
from jaxscale.tools.corpus.curate.config import NearConfig
from jaxscale.tools.corpus.prepare.local import LocalExecutor
from jaxscale.tools.corpus.prepare.lookup import (
    PreparePass,
    from_table,
    group_blocks,
    plan_passes,
    read_table,
    to_table,
    write_table,
)
from jaxscale.tools.corpus.prepare.preparation_page import CONTENT_POLICY, report_page, threshold_sentence
from jaxscale.tools.corpus.prepare.progress import PrepareProgress, RunningPiece
from jaxscale.tools.corpus.prepare.tally import SAMPLES, Tally
from jaxscale.tools.corpus.prepare.tokens import shuffle_keys
from jaxscale.tools.corpus.prepare.work import Task

MANIFEST = {
    "num_documents": 1, "num_tokens": 10, "text_bytes": 40, "shards": [{}], "fingerprint": "f",
    "tokenizer": {"name": "bytes", "vocab_size": 257},
    "recipe": {"stages": ["language"], "sources": {"web": {"licence": "", "synthetic": False}}},
    "sources": {"web": {"documents": 1, "tokens": 10}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "train", "expected"),
    [
        ((), False, [PreparePass((), "tokens")]),
        (("a", "b"), False, [PreparePass(("a", "b"), "tokens")]),
        (("a",), True, [PreparePass(("a",), "sample"), PreparePass((), "tokens")]),
        (
            ("a", "exact_dedup", "near_dedup", "b"),
            False,
            [PreparePass(("a",), "joins", ("exact_dedup", "near_dedup")), PreparePass(("b",), "tokens")],
        ),
        (
            ("exact_dedup", "line_dedup", "near_dedup"),  # a line's first copy may be in a document that is dropped
            False,
            [
                PreparePass((), "joins", ("exact_dedup",)),
                PreparePass((), "joins", ("line_dedup",)),
                PreparePass((), "joins", ("near_dedup",)),
                PreparePass((), "tokens"),
            ],
        ),
        (
            ("exact_dedup", "a", "line_dedup"),
            False,
            [
                PreparePass((), "joins", ("exact_dedup",)),
                PreparePass(("a",), "joins", ("line_dedup",)),
                PreparePass((), "tokens"),
            ],
        ),
    ],
)
def test_a_pass_ends_where_documents_are_compared(stages, train, expected):
    assert plan_passes(stages, train_tokenizer=train) == expected


def test_documents_come_back_from_a_block_as_they_were(tmp_path):
    documents = [
        Document("a\u00e9", "s", "f", 7, "i", "u", "l", "en", (("toxicity", 0.5),)),
        Document("", "s", "f", 8),
        Document("x" * 100, "t", "g", 9, scores=(("a", 0.25), ("b", 1.0))),
    ]
    write_table(tmp_path / "b.arrow", to_table(documents))
    assert from_table(read_table(tmp_path / "b.arrow")) == documents


def test_blocks_are_cut_by_size_and_lose_nothing():
    documents = [Document("x" * (i % 7 + 1)) for i in range(50)]
    blocks = list(group_blocks(documents, 10))
    assert [document for block in blocks for document in block] == documents
    assert all(sum(document.size for document in block[:-1]) < 10 for block in blocks)


def test_tallies_add_up_in_any_order_and_keep_the_same_samples():
    documents = [Document(f"text {i}", "web", "f", i) for i in range(40)]
    outcomes = [Outcome(None, "too short") if i % 3 else Outcome(document) for i, document in enumerate(documents)]
    whole = Tally()
    whole.record("stage", documents, outcomes)
    parts = [Tally(), Tally()]
    for part, chosen in zip(parts, (slice(0, 25), slice(25, 40))):
        part.record("stage", documents[chosen], outcomes[chosen])
    merged = Tally()
    for part in reversed(parts):
        merged.merge(Tally.from_json(json.loads(json.dumps(part.to_json()))))
    assert merged.to_json() == whole.to_json()
    assert len(whole.samples["stage", "too short"]) == SAMPLES


def test_a_stage_that_loses_a_document_is_our_mistake():
    with pytest.raises(AssertionError, match="made 1 outcomes for 2 documents"):
        Tally().record("stage", [Document("a"), Document("b")], [Outcome(Document("a"))])


def test_the_order_of_the_shuffle_never_changes():
    assert shuffle_keys(0, (3, 1), 2).tolist() == [13372183743840786016, 5652304198128663955]
    assert shuffle_keys(0, (3, 1), 2).tolist() != shuffle_keys(1, (3, 1), 2).tolist()


class Page(html.parser.HTMLParser):
    """Tags that are opened and never closed, and all that were seen."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], set(), ""

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        assert not [name for name, _ in attributes if name.startswith("on")]
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.fault("F29", "H9")
def test_a_report_shows_what_was_dropped_and_runs_nothing_of_it():
    nasty = Document('<script>alert(1)</script><img src=x onerror="y"> \x00 & more', "we<b>b", "a'\"<f>", 3)
    tally = Tally()
    tally.add_documents(("in", "read"), [nasty])
    tally.counts.update([("length", nasty.source, "7"), ("language", nasty.source, "")])
    tally.record("language", [nasty], [Outcome(None, "language: <not> wanted", detail="de")])
    tally.record(
        "decontaminate", [nasty], [Outcome(None, "contamination: evaluation item", detail="a.jsonl:1, a.jsonl:2")]
    )
    facts = {"tally": tally.to_json(), "manifest": MANIFEST, "clusters": [], "fertility": []}
    page, content = Page(), report_page(facts)
    page.feed(content)
    assert CONTENT_POLICY == "default-src 'none'; style-src 'unsafe-inline'"  # and if one got through, it would not run
    head = content.partition("<body>")[0]
    assert f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">' in head
    assert " src=" not in head and "url(" not in content
    assert page.open in ([], ["html"], ["html", "body"])
    assert not page.seen & {"script", "img", "b ", "link", "iframe"}
    for told in ("<script>alert(1)</script>", "<not> wanted", "a.jsonl:2", "no licence is recorded for web", "we<b>b"):
        assert told in page.text
    assert "documents dropped by language: de 1" in page.text and "Languages dropped" in page.text


def test_a_threshold_of_near_duplicates_is_said_in_words():
    told = threshold_sentence(NearConfig(threshold=0.75))
    assert "about 3.0% of its words" in told and "at most about 25% of the other" in told


class Clock:
    """A clock that is wound by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_progress_tells_rates_drops_and_the_time_that_is_left():
    clock, stream = Clock(), io.StringIO()
    progress = PrepareProgress(stream, clock)
    progress.begin("pass 1: reading", 4)
    counts = [["in", "read", "web", "documents", 100], ["in", "read", "web", "bytes", 2_000_000]]
    counts += [["dropped", "language", "web", "not wanted", "documents", 25]]
    clock.now = 10.0
    progress.add({"tally": {"counts": counts}})
    assert progress.line() == ("pass 1: reading: 1 of 4, 100 documents (10/s, 0.2 MB/s), 25% dropped, 0:30 left")
    progress.add({"tally": {"counts": counts}, "was_done": True})  # by an earlier run: no part of our speed
    assert "100 documents" in progress.line() and "0:20 left" in progress.line()
    with progress.ticking(
        lambda: "7 blocks", lambda: [RunningPiece(0.75, 0.25, 300, 5_000_000)]
    ):  # half by a killed run
        assert progress.line() == (
            "pass 1: reading: 2 of 4, 400 documents (40/s, 0.7 MB/s), 25% dropped, 7 blocks, 0:08 left"
        )
    earlier = {"documents": 90, "bytes": 1_900_000}  # of 100: blocks that a killed run has left
    progress.add({"tally": {"counts": counts}, "earlier": earlier})
    assert "110 documents (11/s, 0.2 MB/s), 25% dropped" in progress.line()
    progress.begin("pass 1: reading", 1)
    clock.now += 10  # inside the one piece there is
    with progress.ticking(lambda: "3 blocks", lambda: [RunningPiece(0.25, 0.0, 50, 1_000_000)]):
        assert progress.line() == "pass 1: reading: 0 of 1, 50 documents (5/s, 0.1 MB/s), 3 blocks, 0:30 left"


def refuse(task):
    if task.number == 3:
        from jaxscale.units import parse

        parse("amount", "three")
    return task.number


@pytest.mark.slow
def test_an_error_for_people_stays_one_on_its_way_out_of_another_process_and_ends_no_process_but_its_own():
    callers = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    callers.start()
    with pytest.raises(ValueError, match="amount='three' is not an amount of training"), LocalExecutor(2) as executor:
        list(executor.run_all(refuse, Task("", 0), 5))
    end = time.monotonic() + 20  # the pool's own thread may have waited for a process, and not noted yet how it ended
    while multiprocessing.active_children() != [callers] and time.monotonic() < end:
        time.sleep(0.05)
    assert len(executor.context.started) == 2 and multiprocessing.active_children() == [callers]
    callers.terminate()
    callers.join(20)
