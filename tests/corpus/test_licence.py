"""A document's licence decides, by name or pattern; what names none has its own rule."""

import pytest

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.config import LicenceConfig
from jaxscale.tools.corpus.curate.origin import DENIED, NOT_ALLOWED, UNKNOWN_LICENCE, make_licence


def reason(licence, **settings):
    (outcome,) = make_licence(LicenceConfig(**settings))([Document("text", licence=licence)])
    assert (outcome.document is None) == bool(outcome.reason)
    assert outcome.document is None or outcome.document.licence == licence
    return outcome.reason


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("MIT", ""),
        ("mit ", ""),
        ("CC-BY-4.0", ""),
        ("cc by 4.0", ""),
        ("cc_by-nc-4.0", DENIED),
        ("GPL-3.0", NOT_ALLOWED),
        ("MIT-0", NOT_ALLOWED),
        ("", ""),
        ("NOASSERTION", ""),
    ],
)
def test_names_and_patterns_are_compared_without_case(licence, expected):
    assert reason(licence, allow=("mit", "CC-BY-*"), deny=("*-nc-*",)) == expected


def test_without_lists_everything_is_kept():
    assert {reason(name) for name in ("", "MIT", "anything")} == {""}


def test_a_document_without_a_licence_is_kept_dropped_or_stops_the_work():
    assert reason("unknown", unknown="drop") == UNKNOWN_LICENCE
    assert reason("", unknown="drop", deny=("gpl*",)) == UNKNOWN_LICENCE
    assert reason("other", unknown="drop", allow=("other",)) == ""
    with pytest.raises(ValueError, match=r"b.jsonl at 5 has an unknown licence \('none'\)"):
        make_licence(LicenceConfig(unknown="stop"))([Document("x", licence="none", file="b.jsonl", offset=5)])


def test_the_licence_is_told_with_a_drop_and_order_is_kept():
    docs = [Document("a", licence="mit"), Document("b", licence="GPL-3.0"), Document("c", licence="mit")]
    outcomes = make_licence(LicenceConfig(allow=("mit",)))(docs)
    assert [outcome.document for outcome in outcomes] == [docs[0], None, docs[2]] and outcomes[1].detail == "GPL-3.0"


def test_an_empty_pattern_is_refused():
    with pytest.raises(ValueError, match="`unknown`"):
        LicenceConfig(allow=("mit", " "))
