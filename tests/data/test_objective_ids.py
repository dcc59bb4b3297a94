"""The ids that an objective needs come from its settings or from the tokenizer, and what is missing is told."""

import numpy as np
import pytest

from jaxscale.runtime.data.objective_config import MaskedLmConfig, SpanCorruptionConfig, Ul2Config
from jaxscale.runtime.data.objectives.ids import find_ids
from jaxscale.runtime.text.tokenizer.base import ObjectiveTokens
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer

BYTES, VOCAB = ByteTokenizer(), 1000


class WithIds:
    name, eos_id, vocab_size = "words.json", 1, 90
    marks = ObjectiveTokens(mask_id=2, sentinel_ids=(89, 88, 87))
    token_bytes = np.array([0, 0, 0] + [1] * 84 + [0] * 3)


def test_ids_come_from_the_settings_or_else_from_the_tokenizer():
    find = lambda cfg: find_ids(cfg, WithIds(), WithIds.token_bytes, 100, 20)
    assert find(MaskedLmConfig()).mask_id == 2
    assert find(MaskedLmConfig(mask_id=95)).mask_id == 95
    spans = find(SpanCorruptionConfig())
    assert spans.sentinels.tolist() == [89, 88, 87] and spans.end_id == spans.start_id == 1
    down = find(SpanCorruptionConfig(first_sentinel_id=99, num_sentinels=3, sentinel_step=-1))
    assert down.sentinels.tolist() == [99, 98, 97]
    assert set(range(100)) - set(np.flatnonzero(spans.is_special)) == set(range(3, 87))


@pytest.mark.parametrize(
    ("cfg", "seq_len", "told"),
    [
        (MaskedLmConfig(), 20, "data.objective.mask_id must be given (data.tokenizer=bytes has no such id)"),
        (
            MaskedLmConfig(mask_id=1000),
            20,
            "which is outside model.vocab_size=1000; set model.vocab_size to at least 1001",
        ),
        (MaskedLmConfig(mask_id=65), 20, "which the tokenizer uses for text; use an id outside its vocabulary"),
        (SpanCorruptionConfig(), 20, "data.objective.first_sentinel_id must be given"),
        (SpanCorruptionConfig(first_sentinel_id=950), 20, "set model.vocab_size to at least 1050"),
        (SpanCorruptionConfig(first_sentinel_id=300), 2048, "needs 102 sentinels, but there are only 100"),
        (SpanCorruptionConfig(first_sentinel_id=256), 20, "both use id 256"),
        (Ul2Config(first_sentinel_id=300), 64, "data.objective.mode_ids has no id for the modes R, S, X"),
    ],
)
def test_an_id_that_is_missing_is_told_with_the_setting(cfg, seq_len, told):
    with pytest.raises(ValueError) as error:
        find_ids(cfg, BYTES, BYTES.token_bytes, VOCAB, seq_len)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: MaskedLmConfig(rate=0.0), "rate=0.0"),
        (lambda: MaskedLmConfig(mask_part=0.8, random_part=0.3), "their sum at most 1"),
        (lambda: SpanCorruptionConfig(noise_density=1.0), "noise_density=1.0"),
        (lambda: SpanCorruptionConfig(mean_span=0.5), "mean_span=0.5"),
        (lambda: SpanCorruptionConfig(multiple_of=0), "multiple_of=0"),
        (lambda: Ul2Config(denoisers=()), "denoisers is empty"),
        (lambda: Ul2Config(denoisers=(("Q", 0.1, 3.0, 1.0),)), "mode 'Q'"),
        (lambda: Ul2Config(denoisers=(("R", 0.1, 3.0, 0.0),)), "all 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, told):
    with pytest.raises(ValueError) as error:
        make()
    assert told in str(error.value)
