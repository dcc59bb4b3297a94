"""Named evaluators: at their cadence, in the metrics, compiled once, and without a bit of difference to training."""

import dataclasses
import json

import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.runtime.monitor.history import read_history
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.training import loop
from jaxscale.system.exits import Exit

QUIET = {"monitor.progress": "off", "monitor.log_every_steps": 1, "eval.num_rows": 0, "checkpoint.save_every_steps": 0}
MESH = {"mesh.data": 4, "mesh.tensor": 2, "train.num_microbatches": 2, "model.vocab_size": 258}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": f"text {n} " * 40}) + "\n" for n in range(40)))
    (folder / "wiki.txt").write_text("A text that no one trains on.")
    (folder / "words.jsonl").write_text('{"text": "go to Ann"}\n{"text": "go to Bo"}\n')
    return folder


def evals_of(files):
    wiki = {"kind": "text", "files": str(files / "wiki.txt"), "every_steps": 2}
    return {"wiki": wiki, "words": {"kind": "cloze", "file": str(files / "words.jsonl"), "every_steps": 0}}


def open_tiny(folder, files, evals, overrides=None, make=make_program):
    data = {"data.name": "files", "data.files": str(files / "corpus.jsonl"), "train_tokens": "5 steps"}
    cfg = tiny.config(QUIET | MESH | data | {"evals": evals} | (overrides or {}))
    return open_run(cfg, str(folder), log=lambda text: None, make_program=make)


@pytest.mark.soak
def test_a_run_that_is_measured_is_the_same_and_its_numbers_are_in_the_metrics(tmp_path, files):
    plain = open_tiny(tmp_path / "plain", files, {}, {"train.ema.decay": 0.5})
    wanted = tiny.host(loop.train(plain))
    measured = lambda: open_tiny(
        tmp_path / "run", files, evals_of(files), {"train.ema.decay": 0.5}, tiny.reuse(plain.parts.program)
    )
    begun = measured()
    loop.train(dataclasses.replace(begun, stop_after=3))
    run = measured()  # goes on
    tiny.assert_same_bits(tiny.host(loop.train(run)), wanted)
    history = read_history(tmp_path / "run")
    steps, values = history.evaluated("evals/wiki/bits_per_byte")
    assert steps == [0, 2, 3, 4, 5] and values[0] > values[-1] and not history.abandoned
    assert history.evaluated("evals/words/acc")[0] == [3, 5] and history.series("loss")[0] == [1, 2, 3, 4, 5]
    assert history.evaluated("evals_ema/wiki/bits_per_byte")[0] == steps
    assert history.series("evals_seconds")[0] == steps
    scorer = run.evaluators[0].evaluate.args[0]
    assert scorer.step.__wrapped__._cache_size() == 1  # rows of 16 and of 32 tokens would be two
    events = b"".join(path.read_bytes() for path in (tmp_path / "run" / "tensorboard").iterdir())
    assert b"evals/wiki/bits_per_byte" in events


@pytest.mark.parametrize(
    "change, told",
    [
        ({"wiki.files": "nowhere.txt"}, "evals.wiki.files=nowhere.txt does not exist"),
        ({"words.file": "nowhere.jsonl"}, "evals.words.file=nowhere.jsonl does not exist"),
        ({"words.file": "{}/corpus.jsonl"}, "the continuation|ends in a space"),
    ],
)
def test_data_that_are_not_there_are_told_before_anything_compiles(tmp_path, files, change, told):
    evals = evals_of(files)
    ((name, value),) = change.items()
    evals[name.partition(".")[0]][name.partition(".")[2]] = value.format(files)
    with pytest.raises(ValueError, match=told) as caught:
        open_tiny(tmp_path / "run", files, evals, make=lambda cfg, budget: pytest.fail("it compiles"))
    assert "\n" not in str(caught.value) and Exit.BAD_INPUT == 2


@pytest.mark.parametrize(
    "evals, told",
    [
        ({"a": {"file": "x"}}, r"evals.a.kind must be given; set it to one of \['choice', 'cloze', 'text'\]"),
        ({"a": {"kind": "chois"}}, "evals.a.kind='chois' must be one of .*did you mean 'choice'"),
        ({"a": {"kind": "text"}}, "evals.a.files must be given"),
        ({"a": {"kind": "text", "files": "x", "every_step": 1}}, "did you mean 'every_steps'"),
        ({"a/b": {"kind": "text", "files": "x"}}, "evals has an invalid name 'a/b'"),
        ({"a": {"kind": "text", "files": "x", "limit": -1}}, "evals.a: limit=-1 must be 0 or more"),
    ],
)
def test_settings_are_typed(evals, told):
    with pytest.raises(ValueError, match=told):
        tiny.config({"evals": evals})


def test_an_encoder_and_ids_without_a_tokenizer_are_refused(tmp_path, files):
    with pytest.raises(ValueError, match="evals need a decoder"):
        tiny.config({"model": tiny.ENCODER, "data.objective.name": "masked_lm", "evals": evals_of(files)})
    with pytest.raises(ValueError, match="evals need a tokenizer, but the data of this run are token ids"):
        open_tiny(tmp_path / "run", files, evals_of(files), {"data.name": "synthetic", "data.files": ""})
