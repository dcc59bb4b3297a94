"""A small corpus with duplicates."""

import made_text
import pytest


@pytest.fixture(scope="module")
def texts():
    made = [made_text.text(i, words=60 + 7 * (i % 11)) for i in range(120)]
    return [*made, *made[10:20], *(f"{each} One more." for each in made[30:36])]  # exact and near duplicates


@pytest.fixture
def corpus(tmp_path, texts):
    (tmp_path / "raw").mkdir()
    made_text.write_jsonl(tmp_path / "raw" / "a.jsonl", texts[: len(texts) // 2])
    made_text.write_jsonl(tmp_path / "raw" / "b.jsonl", texts[len(texts) // 2 :])
    return tmp_path / "raw" / "*.jsonl"
