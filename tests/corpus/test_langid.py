"""Languages are the library's own, found for a whole block at once; what is not wanted is dropped with its language."""

import gzip
import json
import pathlib
import unicodedata
from collections import Counter

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

pytest.importorskip("py3langid", reason="py3langid (jaxscale[prepare]) is not installed")

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from jaxscale.runtime.text.document import Document
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.sources.read import read_file
from jaxscale.tools.corpus.curate import langid
from jaxscale.tools.corpus.curate.config import LanguageConfig
from jaxscale.tools.corpus.curate.langid import DOUBT, REASON, identify, make_language
from jaxscale.tools.corpus.prepare.config import PrepareConfig, SourceConfig

CORPORA = pathlib.Path(__file__).parents[2] / ".." / "shared" / "corpora"
SAMPLES = {
    "en": "The committee will meet again on Thursday to discuss what has been learned from the survey.",
    "de": "Der Ausschuss wird sich am Donnerstag erneut treffen, um die Ergebnisse der Umfrage zu besprechen.",
    "fr": "Le comité se réunira de nouveau jeudi pour discuter des résultats de l'enquête.",
    "es": "El comité se reunirá de nuevo el jueves para hablar de los resultados de la encuesta.",
    "ru": "Комитет снова соберётся в четверг, чтобы обсудить результаты опроса.",
    "ja": "委員会は木曜日に再び集まり、調査の結果について話し合います。",
    "ar": "ستجتمع اللجنة مرة أخرى يوم الخميس لمناقشة نتائج الاستطلاع.",
    "hi": "समिति सर्वेक्षण के परिणामों पर चर्चा करने के लिए गुरुवार को फिर से मिलेगी।",
}


@pytest.fixture(scope="module")
def library():
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def agrees(answer, expected):
    """The same language and probability, but for the library's float32 sums."""
    return answer[0] == expected[0] and abs(answer[1] - expected[1]) < 2e-4


@pytest.mark.parametrize("code", SAMPLES)
def test_a_sentence_is_known_for_what_it_is(code):
    ((language, probability),) = identify([SAMPLES[code]])
    assert language == code and 0.5 < probability <= 1


@pytest.mark.parametrize(
    "text",
    [
        unicodedata.normalize("NFD", SAMPLES["fr"]),
        SAMPLES["de"].upper(),
        "Ово је Beograd, glavni grad",  # two classes of one label: their probabilities add up
        "бу ўзбекча oʻzbekcha so'z",
    ],
)
def test_other_forms_capitals_and_second_scripts_are_seen_as_the_library_sees_them(text, library):
    assert agrees(identify([text])[0], library.classify(text))


def test_the_order_and_company_of_documents_change_nothing():
    texts = [*SAMPLES.values(), "", "x", *[text * 9 for text in SAMPLES.values()]]
    together = identify(texts)
    assert together == [identify([text])[0] for text in texts]
    assert identify(texts[::-1]) == together[::-1]


def test_many_documents_are_stepped_in_chunks(monkeypatch):
    texts = list(SAMPLES.values()) * 3
    whole = identify(texts)
    monkeypatch.setattr(langid, "CHUNK", 5)
    assert identify(texts) == whole


def test_any_text_gets_the_librarys_answer(library):
    @settings(deadline=None)  # the first call loads the model
    @given(st.lists(st.text(max_size=60) | st.sampled_from(sorted(SAMPLES.values())), max_size=6))
    def check(texts):
        for text, answer in zip(texts, identify(texts), strict=True):
            expected = library.classify(text)
            if answer == ("und", 0.0):  # no feature: the library names its first language, with equal odds for all
                assert expected[1] < 0.03
            else:
                assert agrees(answer, expected), text

    check()


def test_sums_are_the_same_in_any_order():
    model = langid.load_model()
    rng = np.random.default_rng(0)
    features, weights = rng.integers(0, len(model.likelihoods), 900), langid.log_counts(99)[rng.integers(1, 99, 900)]
    terms = model.likelihoods[features].astype(np.float64) * weights[:, None]
    sums = [terms[order].sum(axis=0) for order in (np.arange(900), np.arange(900)[::-1], rng.permutation(900))]
    assert all(np.array_equal(sums[0], other) for other in sums)


def test_languages_are_noted_and_the_unwanted_dropped():
    docs = [Document(text, id=code) for code, text in SAMPLES.items()]
    outcomes = make_language(LanguageConfig(keep=("en", "ja")))(docs)
    assert [outcome.document.language for outcome in outcomes if outcome.document] == ["en", "ja"]
    assert [(outcome.reason, outcome.detail) for outcome in outcomes if not outcome.document] == [
        (REASON, code) for code in SAMPLES if code not in ("en", "ja")
    ]
    (column, value), *_ = outcomes[0].document.scores
    assert column == "language" and 0.5 < value <= 1 and outcomes[0].document.id == "en"


def test_a_doubtful_document_is_dropped_and_an_empty_one_has_no_language():
    docs = [Document("zq"), Document(""), Document(SAMPLES["en"] * 3)]
    outcomes = make_language(LanguageConfig(min_probability=0.6))(docs)
    assert [outcome.reason for outcome in outcomes] == [DOUBT, DOUBT, ""] and outcomes[1].detail == "und"
    kept = make_language(LanguageConfig())(docs)
    assert [outcome.document.language for outcome in kept][1:] == ["und", "en"]


def test_only_the_head_is_read():
    text = SAMPLES["de"] + SAMPLES["en"] * 9
    assert make_language(LanguageConfig(head_chars=90))([Document(text)])[0].document.language == "de"
    assert make_language(LanguageConfig(head_chars=0))([Document(text)])[0].document.language == "en"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_files_word_is_taken_where_it_is_trusted_and_a_code(tmp_path, kind):
    tags = ["fr", "EN-us", "deu", "english", "und", "", None]
    records = [{"text": SAMPLES["de"], "language": tag} for tag in tags]
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    for known, found in (("overwrite", ["de"] * 7), ("trust", ["fr", "en", "deu", "de", "de", "de", "de"])):
        language = LanguageConfig(known=known)
        recipe = PrepareConfig(sources={"s": SourceConfig(files="a")}, language=language)
        file = SourceFile(str(tmp_path / f"a.{kind}"), "a", "s")
        documents = list(read_file(file, recipe.read_cfg("s"), Counter()))
        assert [outcome.document.language for outcome in make_language(language)(documents)] == found
    (dropped, kept, *_) = make_language(LanguageConfig(known="trust", keep=("en", "deu")))(documents)
    assert dropped.detail == "fr" and dict(kept.document.scores) == {"language": 1.0}


def test_wrong_settings_are_told():
    for wrong, told in [
        ({"min_probability": 1.5}, "0 to 1"),
        ({"head_chars": -1}, "head_chars"),
        ({"keep": ("EN",)}, "lower-case letters"),
    ]:
        with pytest.raises(ValueError, match=told):
            LanguageConfig(**wrong)
    with pytest.raises(ValueError, match=r"unsupported \['eng'\]; supported: "):
        make_language(LanguageConfig(keep=("eng",)))


def labelled_sentences():
    folder = CORPORA / "multilingual" / "lingua_sentences"
    if not folder.is_dir():
        pytest.skip("the multilingual sentences (../shared/corpora) are not here")
    for path in sorted(folder.glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                yield path.stem, line.strip()


def test_labelled_sentences_are_right_as_often_as_in_the_library(library):
    labels, texts = zip(*labelled_sentences())
    answers = identify(texts)
    assert np.mean([language == label for (language, _), label in zip(answers, labels)]) >= 0.985
    assert all(agrees(answer, library.classify(text)) for answer, text in list(zip(answers, texts))[::25])


@pytest.mark.soak
def test_no_sentence_and_no_english_document_differs_from_the_library(library):
    texts = [text for _, text in labelled_sentences()]
    for path in sorted((CORPORA / "gutenberg").glob("*.en.txt.gz")):
        book = gzip.open(path, "rt", encoding="utf-8", errors="replace").read()
        texts += [book[i : i + 400] for i in range(0, len(book), 3300)]
    different = [text for text, answer in zip(texts, identify(texts)) if not agrees(answer, library.classify(text))]
    assert not different, different[:5]
