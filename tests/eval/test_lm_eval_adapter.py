"""What lm-eval is answered, without lm-eval; tests/eval/test_lm_eval_peer.py asks through it."""

import functools

import jax
import made_model
import numpy as np
import pytest
from no_packages import no_distribution

from jaxscale.api.inference import make_generator, open_model
from jaxscale.cli import evaluate
from jaxscale.runtime.eval.bits_per_byte import EvalReading
from jaxscale.runtime.eval.lm_eval_adapter import (
    Served,
    WriteSettings,
    flattened,
    generated,
    log_likelihoods,
    rolling_log_likelihoods,
    write_settings,
)
from jaxscale.runtime.eval.named import encode_pair
from jaxscale.runtime.eval.scorer import Scorer, TokenSpan
from jaxscale.runtime.sampling.config import GREEDY, Sampling
from jaxscale.runtime.text.chat.spans import open_prompts
from jaxscale.runtime.text.chat.template import load_template
from jaxscale.runtime.text.config import ChatConfig
from jaxscale.runtime.text.tokenizer.load import load_tokenizer, save_tokenizer
from jaxscale.system.exits import BadInput

pytestmark = pytest.mark.slow

CONTEXT = 32


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    made_model.make_workdir(folder, scale=3.0)
    save_tokenizer(load_tokenizer("bytes"), folder, load_template(load_tokenizer("bytes"), ChatConfig()).note)
    model = open_model(str(folder), say=lambda line: None)
    reading = EvalReading.of(model.saved_tokenizer.tokenizer, CONTEXT)
    open_generator = functools.cache(lambda rows, longest: make_generator(model, batch=rows, longest=longest))
    return Served(reading, model.saved_tokenizer, Scorer.of(model.sharded, 256), model.params, open_generator, rows=2)


def nats(served, text, first):
    ids = np.array(list(text.encode("latin-1")), np.int32)
    return float(served.scorer.score(served.params, [TokenSpan(ids, first)]).nats[0])


def test_a_space_belongs_to_the_continuation_and_long_contexts_are_cut(served):
    pairs = [("ab ", "cd"), ("ab", " cd"), ("x" * 40 + "y", "z")]
    (one, _), (other, _), (cut, _) = log_likelihoods(served, pairs)
    assert one == other == pytest.approx(-nats(served, "ab cd", 2), rel=1e-5)
    assert cut == pytest.approx(-nats(served, "x" * (CONTEXT - 1) + "yz", CONTEXT), rel=1e-5)


class Joined:
    """Bytes, but that 'the' before 're' becomes one token."""

    eos_id, begin_ids = 256, ()

    def encode(self, text):
        return np.array(list(text.encode().replace(b"there", b"T")), np.int32)


def test_a_token_that_spans_the_join_leaves_the_continuation_alone(served):
    reading = EvalReading.of(Joined(), CONTEXT)
    found = log_likelihoods(served._replace(reading=reading), [("the", "re"), ("a", "b")])
    assert found[0][0] == pytest.approx(-nats(served, "there", 3), rel=1e-5) and found[1][0] < 0


def test_a_rolling_text_adds_up_over_its_windows(served):
    text = "abcdefgh" * 10
    ids = np.array([256, *text.encode()], np.int32)
    windows = [TokenSpan(ids[:33], 1), TokenSpan(ids[32:65], 1), TokenSpan(ids[81 - 33 :], 17)]
    wanted = -served.scorer.score(served.params, windows).nats.sum()
    found = rolling_log_likelihoods(served, [text, "", "ab"])
    assert found[0] == pytest.approx(wanted, rel=1e-5) and found[1] == 0.0 and found[2] < 0


def test_truncated_contexts_are_scored_and_their_number_is_logged_once(served):
    lines = []
    logged = served._replace(say=lines.append)
    long = "x" * CONTEXT
    found = log_likelihoods(logged, [(f"a{long}", "z"), ("a", "b"), (f"b{long}", "z"), ("x", "y" * CONTEXT)])
    assert found[0] == found[2] and lines == [f"lm-eval: 2 of 4 contexts truncated on the left to {CONTEXT} tokens"]
    settings = {"max_gen_toks": 6, "until": []}
    generated(logged, [("ab", settings), (long, settings), ("a", settings | {"max_gen_toks": 3})])
    assert lines[1:] == [f"lm-eval: 1 of 3 prompts truncated on the left to leave room for new tokens in {CONTEXT}"]
    log_likelihoods(logged, [("a", "b")])
    generated(logged, [("a", settings)])
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("continuation", "told"), [("", "the continuation '' has no token"), ("y" * 33, "the continuation has 33 tokens")]
)
def test_a_continuation_that_cannot_be_scored_is_refused_with_its_context(served, continuation, told):
    """lm-eval's HFLM stops there too: assert len(continuation_enc) > 0, and <= self.max_length."""
    with pytest.raises(BadInput, match=f"lm-eval request with context '.*the end': {told}") as error:
        log_likelihoods(served, [("a", "b"), ("the beginning " + "x" * 99 + " and the end", continuation)])
    assert "beginning" not in str(error.value)


def test_likelihoods_that_are_not_numbers_are_told(served):
    broken = served._replace(params=jax.tree.map(lambda leaf: leaf * np.float32(np.nan), served.params))
    for ask, asked in ((log_likelihoods, [("a", "b")]), (rolling_log_likelihoods, ["ab"])):
        with pytest.raises(ValueError, match="this checkpoint gives NaN likelihoods; evaluate another step"):
            ask(broken, asked)


def test_texts_of_many_lengths_and_settings_come_back_in_their_order(served):
    asked = [("some text", {"until": [], "max_gen_toks": n}) for n in (3, 6, 3)] + [("a", {"max_gen_toks": 6})]
    found = generated(served, asked)
    assert found[0] == found[2] and found[1].startswith(found[0]) and len(found[1]) > len(found[0])
    stopped = generated(served, [("some text", {"until": found[1][2:4], "max_gen_toks": 6})])
    assert stopped == [found[1].partition(found[1][2:4])[0]]
    long = generated(served, [("x" * 99 + "some text", {"max_gen_toks": 6})])
    assert len(long[0]) > 0
    with pytest.raises(ValueError, match="32 new tokens do not fit in a context of 32"):
        generated(served, [("a", {"max_gen_toks": 32})])


QUESTION = {"role": "user", "content": "a<|endoftext|>"}
ASKED = [*b"<|im_start|>user\na<|endoftext|>", 256, *b"<|im_start|>assistant"]


def test_the_special_tokens_of_a_chat_template_are_ids_and_those_that_a_task_has_written_are_text(served):
    asking, reading = open_prompts(served.tokenizer, "2026-11-22"), served.reading._replace(begin_ids=(256,))
    written = asking.text([QUESTION], True)
    pair = encode_pair(reading, written, "b<|endoftext|>", asking.text_ids)
    assert pair.ids.tolist() == [*ASKED, *b"\nb<|endoftext|>"]  # what begins a text is the template's to write
    assert pair.first == len(ASKED)  # behind white space at the end, as in texts
    alone = encode_pair(reading, "", "b", asking.text_ids)
    assert alone.ids.tolist() == [256, *b"b"] and alone.first == 1

    ((found, _),) = log_likelihoods(served._replace(reading=reading._replace(context=99)), [(written, "b")], asking)
    span = TokenSpan(np.array([*ASKED, *b"\nb"], np.int32), len(ASKED))
    assert found == pytest.approx(-float(served.scorer.score(served.params, [span]).nats[0]), rel=1e-5)
    write = lambda how: generated(served, [(written, {"max_gen_toks": 6})], how)
    assert len(write(asking)[0]) > 0 and write(asking._replace(stop_ids=tuple(range(256)))) == [""]


def test_settings_of_a_task_become_ours():
    assert write_settings({"until": "\n", "temperature": 0.7}) == WriteSettings(
        sampling=GREEDY, num_tokens=256, stops=("\n",)
    )
    drawn = write_settings({"do_sample": True, "top_p": 0.9, "max_gen_toks": 5, "until": ["a", ""]})
    assert drawn == WriteSettings(sampling=Sampling(temperature=1.0, top_p=0.9), num_tokens=5, stops=("a",))
    assert write_settings({"repetition_penalty": 1.5}).sampling == Sampling(temperature=0.0, repetition_penalty=1.5)
    with pytest.raises(ValueError, match="generation_kwargs num_beams are not supported"):
        write_settings({"num_beams": 4})


def test_results_are_named_by_task():
    results = {"a": {"alias": "a", "acc,none": 0.5, "acc_stderr,none": "N/A", "em,strict": 1}}
    assert flattened(results) == {"a/acc": 0.5, "a/em.strict": 1.0}


def test_without_the_package_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.metadata.distribution", no_distribution)
    with pytest.raises(ValueError, match=r"which is not installed: pip install 'jaxscale\[lm_eval\]'"):
        evaluate.main(["--workdir=w", "--lm_eval=piqa"])
