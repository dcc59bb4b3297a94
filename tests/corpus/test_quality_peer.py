"""The rules of quality keep and drop what datatrove's do, on real documents.

Needs JAXSCALE_DATATROVE_PYTHON, the Python of an environment with datatrove 0.10 and its processing and multilingual
extras, and the corpora; about four minutes.
"""

import json
import os
import pathlib
import subprocess

import pytest
from english import english_documents

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.config import C4Config, FineWebConfig, GopherConfig, RepetitionConfig
from jaxscale.tools.corpus.curate.quality import make_c4, make_fineweb, make_gopher, make_repetition

pytestmark = pytest.mark.peer
DATATROVE = dict(min_line_words=3, min_sentences=5)  # its defaults are not those of C4's published code
STAGES = {
    "gopher": make_gopher(GopherConfig(words="spacy")),
    "repetition": make_repetition(RepetitionConfig(words="spacy")),
    "fineweb": make_fineweb(FineWebConfig()),
    "c4": make_c4(C4Config(**DATATROVE, end_marks=(".", "?", "!", '"', "'"))),
    "c4_keeping_lines": make_c4(C4Config(**DATATROVE, terminal_punctuation=False)),
}


@pytest.fixture(scope="module")
def decisions(tmp_path_factory):
    """The texts, and what datatrove says of each."""
    python = os.environ.get("JAXSCALE_DATATROVE_PYTHON")
    if not python:
        pytest.skip("needs JAXSCALE_DATATROVE_PYTHON: the Python of an environment with datatrove 0.10")
    texts = english_documents()
    folder = tmp_path_factory.mktemp("datatrove")
    (folder / "documents.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    script = pathlib.Path(__file__).with_name("datatrove_decisions.py")
    command = [python, str(script), str(folder / "documents.jsonl"), str(folder / "decisions.jsonl")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(command, check=True, env=environment, timeout=1800)
    rows = (folder / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    return texts, [json.loads(row) for row in rows]


@pytest.mark.parametrize("name", STAGES)
def test_at_least_99_of_100_documents_get_the_same_verdict(name, decisions):
    texts, theirs = decisions
    outcomes = STAGES[name]([Document(text) for text in texts])
    differ = [
        (outcome.reason, row[name])
        for outcome, row in zip(outcomes, theirs, strict=True)
        if (outcome.document is None) != bool(row[name])
    ]
    print(f"{name}: {len(differ)} of {len(texts)} documents differ: {differ[:10]}")
    assert len(texts) > 3000
    assert len(differ) <= 0.01 * len(texts)
    if name.startswith("c4"):  # and of those that both keep, the same lines
        edited = sum(
            outcome.document is not None and not row[name] and outcome.document.text != row[f"{name}_text"]
            for outcome, row in zip(outcomes, theirs)
        )
        assert edited <= 0.01 * len(texts)
