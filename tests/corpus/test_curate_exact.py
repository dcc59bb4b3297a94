"""Exact copies of documents and lines: the first stays, later ones go, and nothing else is touched."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sketched import pairs_of

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.config import ExactConfig, LineConfig
from jaxscale.tools.corpus.curate.duplicates import (
    cut_lines,
    drop_documents,
    exact_sketch,
    line_sketch,
    lines_at,
)
from jaxscale.tools.corpus.prepare.sketches import block_slice, split_items, write_sketch


def documents_of(texts):
    return [Document(text, source="s", offset=i) for i, text in enumerate(texts)]


def join(blocks, sketch, cfg, folder):
    """The items to remove, of blocks of texts."""
    paths = [folder / f"{block}.npy" for block in range(len(blocks))]
    for block, texts in enumerate(blocks):
        write_sketch(paths[block], sketch(documents_of(texts), cfg))
    return np.unique(pairs_of(paths)[0])


def without_copies(blocks, folder, cfg):
    items, outcomes = join(blocks, exact_sketch, cfg, folder), []
    for block, texts in enumerate(blocks):
        removed = split_items(items[block_slice(items, block)])[1]
        outcomes += drop_documents(documents_of(texts), removed, "duplicate: exact")
    return [outcome.document.text if outcome.document else outcome.reason for outcome in outcomes]


def without_lines(blocks, folder, cfg):
    items, outcomes = join(blocks, line_sketch, cfg, folder), []
    for block, texts in enumerate(blocks):
        documents = documents_of(texts)
        own = lines_at(documents, split_items(items[block_slice(items, block)])[1])
        outcomes += cut_lines(documents, *own, cfg)
    return outcomes


def test_later_copies_of_a_document_are_dropped_across_blocks(tmp_path):
    blocks = [["one", "two", "one"], ["Two", "  two\n", "", "three"], ["", "one"]]
    gone = "duplicate: exact"
    assert without_copies(blocks, tmp_path, ExactConfig()) == [
        "one", "two", gone, "Two", gone, "", "three", "", gone
    ]  # fmt: skip
    assert without_copies(blocks, tmp_path, ExactConfig(lower=True)).count(gone) == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.text("ab \n", max_size=4), max_size=6), max_size=4))
def test_what_is_kept_is_the_first_of_each_text(tmp_path_factory, blocks):
    kept = without_copies(blocks, tmp_path_factory.mktemp("exact"), ExactConfig())
    seen, expected = set(), []
    for text in [text for texts in blocks for text in texts]:
        packed = "".join(text.split())
        expected.append("duplicate: exact" if packed and packed in seen else text)
        seen.add(packed)
    assert kept == expected


LINES = st.sampled_from(["", "a", "long line", "long  line ", "é long one", "other line"])
BLOCKS = st.lists(st.lists(st.lists(LINES, max_size=5).map("\n".join), max_size=4), max_size=4)


@settings(max_examples=60, deadline=None)
@given(BLOCKS)
def test_of_each_long_line_the_first_copy_is_kept(tmp_path_factory, blocks):
    cfg = LineConfig(min_line_characters=6, min_document_characters=0)
    seen, expected = set(), []
    for text in [text for texts in blocks for text in texts]:
        kept = []
        for line in text.split("\n"):
            packed = "".join(line.split())
            kept += [] if len(packed) >= 6 and packed in seen else [line]
            seen.add(packed)
        expected.append("\n".join(kept))
    outcomes = without_lines(blocks, tmp_path_factory.mktemp("lines"), cfg)
    assert [outcome.document.text for outcome in outcomes] == expected


def test_cut_lines_are_counted_and_what_is_too_short_then_is_dropped(tmp_path):
    banner = "Subscribe to the newsletter of this site for more of the same"
    texts = [
        f"First page.\n{banner}",
        f"{banner}\nSecond page, and it has enough text of its own.\n{banner}",
        f"Third.\n{banner}",
    ]
    cfg = LineConfig(min_line_characters=20, min_document_characters=30)
    first, second, third = without_lines([texts[:1], texts[1:]], tmp_path, cfg)
    assert first.document.text == texts[0] and not first.edits
    assert second.document.text == "Second page, and it has enough text of its own."
    assert second.document.offset == 0 and second.edits == (("repeated line", 2),)
    assert third.document is None
    assert third.reason == "repeated lines: too little is left" and third.detail == "1 lines repeated"


def test_a_drop_says_of_what_it_is_a_copy():
    outcomes = drop_documents(documents_of(["a", "b", "c"]), np.array([1, 2]), "duplicate: near")
    assert [(o.document is None, o.reason) for o in outcomes] == [(False, ""), *[(True, "duplicate: near")] * 2]


@pytest.mark.parametrize("wrong", [dict(min_line_characters=0), dict(min_document_characters=-1)])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LineConfig(**wrong)
