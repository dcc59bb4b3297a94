"""The sample that a training run writes: of any length, never the end of a document, the same for the same state."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from jaxscale.runtime.run.startup_log import make_sample
from jaxscale.runtime.sampling.config import SampleConfig
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer


class Letters(ByteTokenizer):
    """Bytes of which only those below eight are in the vocabulary; five begins a document, seven ends one."""

    vocab_size, eos_id, begin_ids = 8, 7, (5,)

    def decode(self, ids):
        return "".join(map(str, ids))


@pytest.mark.soak
def test_a_sample_is_longer_than_the_rows_of_training_and_never_ends_a_document():
    shared = tiny.program()
    sample = SampleConfig(num_tokens=50, prompt="\1", temperature=9.0, top_k=0)
    program = dataclasses.replace(shared, cfg=dataclasses.replace(shared.cfg, sample=sample))
    said = []
    write, state = make_sample(program, Letters(), said.append), shared.init()
    text = write(state)
    assert len(text) == 52 > tiny.SEQ_LEN and set(text) <= set("0123456") and len(set(text[20:])) > 3
    assert text.startswith("51")  # the model has read documents that begin so
    assert write(state) == text
    assert [line.partition(" for ")[0] for line in said if "compiling" in line] == ["sample: compiling"]
    lost = write(state._replace(params=jax.tree.map(lambda leaf: leaf * np.nan, state.params)))
    assert lost.startswith("(no text: the logits of token 1")  # and the run goes on
    assert write(state._replace(params=jax.tree.map(lambda leaf: leaf * 3, state.params))) != text
    halves = [text[i : i + 8] for i in range(16, 48, 8)]
    assert len(set(halves)) == len(halves)  # each row has draws of its own


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"top_k": -1}, "top_k=-1 must be at least 0"),
        ({"num_tokens": -1}, "num_tokens=-1 must be at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        SampleConfig(**settings)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt must not be empty"):
        SampleConfig(prompt="")
