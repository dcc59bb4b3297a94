"""The score is the package's own, noted and not acted on unless asked; a word list counts whole words."""

import pytest

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.classifier import LISTED, TOO_TOXIC, make_counter, make_toxicity
from jaxscale.tools.corpus.curate.config import ToxicityConfig
from jaxscale.tools.corpus.curate.quality import read_words

MILD, RUDE = Document("The harvest was good this year."), Document("You are a stupid bloody idiot, shut up you moron!")


def test_scores_are_noted_and_nothing_is_dropped():
    profanity_check = pytest.importorskip("profanity_check", reason="alt-profanity-check (jaxscale[prepare]) is absent")
    outcomes = make_toxicity(ToxicityConfig())([MILD, RUDE, Document("")])
    scores = [dict(outcome.document.scores)["toxicity"] for outcome in outcomes]
    assert scores[0] < 0.2 < 0.8 < scores[1]
    assert scores == pytest.approx(profanity_check.predict_prob([MILD.text, RUDE.text, ""]), abs=1e-4)
    assert make_toxicity(ToxicityConfig())([]) == []


def test_a_threshold_drops_what_is_above_it():
    pytest.importorskip("profanity_check", reason="alt-profanity-check (jaxscale[prepare]) is absent")
    outcomes = make_toxicity(ToxicityConfig(max_score=0.5))([RUDE, MILD])
    assert [outcome.reason for outcome in outcomes] == [TOO_TOXIC, ""] and float(outcomes[0].detail) > 0.5
    assert make_toxicity(ToxicityConfig(max_score=0.5, head_chars=9))([RUDE])[0].document is not None


def test_a_word_list_counts_whole_words_and_phrases():
    count = make_counter(["darn", "big oaf", "馬鹿", "f**k"])
    assert count("Darn it, DARN!") == 1
    assert count("darned darnit") == 0
    assert count("You BIG OAF, darn") == 2 and count("big oafish") == 0
    assert count("この馬鹿者") == 1
    assert count("what the f**k?") == 1 and count("f**king") == 0


def test_documents_with_listed_words_are_dropped_without_the_model(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "profanity_check", None)
    (tmp_path / "words.txt").write_text("# of our own\n\nDarn # mild\ndrat\n", encoding="utf-8")
    path = str(tmp_path / "words.txt")
    assert read_words(path, "word_list", "#") == ["darn", "drat"]
    docs = [Document("Oh darn."), Document("darn and drat"), MILD]
    settings = {"score": False, "word_list": path}
    assert [outcome.reason for outcome in make_toxicity(ToxicityConfig(**settings))(docs)] == [LISTED, LISTED, ""]
    outcomes = make_toxicity(ToxicityConfig(**settings, max_listed=1))(docs)
    assert [(outcome.reason, outcome.detail) for outcome in outcomes] == [("", ""), (LISTED, "2"), ("", "")]
    with pytest.raises(ValueError, match=r"jaxscale\[prepare\]"):
        make_toxicity(ToxicityConfig())(docs)


def test_wrong_settings_are_told(tmp_path):
    for settings, told in [
        ({"max_score": 2.0}, "0 to 1"),
        ({"max_score": 0.5, "score": False}, "score=True"),
        ({"head_chars": -1}, "head_chars"),
    ]:
        with pytest.raises(ValueError, match=told):
            ToxicityConfig(**settings)
    with pytest.raises(ValueError, match="cannot be read"):
        make_toxicity(ToxicityConfig(word_list=str(tmp_path / "absent.txt")))
    (tmp_path / "empty.txt").write_text("# nothing\n")
    with pytest.raises(ValueError, match="has no words"):
        make_toxicity(ToxicityConfig(word_list=str(tmp_path / "empty.txt")))
