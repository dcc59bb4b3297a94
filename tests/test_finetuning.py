"""From a checkpoint to a fine-tuned one and on to plain weights, with the guarantees of any run."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import tiny
from token_losses import make_token_losses

from jaxscale.api.inference import open_model
from jaxscale.cli import ckpt, convert
from jaxscale.core.models.lora import B, is_adapter
from jaxscale.core.state import ema_params
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.derived_weights import merge_lora
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import seal
from jaxscale.runtime.checkpoint.verify import verify_folder
from jaxscale.runtime.run.opening import open_run, train_to_completion
from jaxscale.runtime.run.startup_log import make_sample
from jaxscale.runtime.sampling.config import SampleConfig
from jaxscale.runtime.text.tokenizer.load import load_tokenizer
from jaxscale.runtime.training import loop
from jaxscale.system.exits import Exit, Stop

pytestmark = pytest.mark.slow

QUIET = {"monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0}
WIDE = {"model.vocab_size": 264, "seq_len": 32, "batch_tokens": "8 rows"}
LORA = {"lora.rank": 4}
PAIRS = [{"prompt": f"say {'abcdefgh'[i % 8]}:", "completion": "abcdefgh"[i % 8] * 5} for i in range(64)]


def program(cfg, budget):
    """The compiled program of a config: one for full runs and one for adapters."""
    average = {"train.ema.decay": cfg.train.ema.decay} if cfg.train.ema.on else {}
    shared = tiny.program(WIDE | average | (LORA if cfg.lora.on else {}))
    return dataclasses.replace(shared, cfg=cfg)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The work folder of a run that there is something to fine-tune from."""
    folder = tmp_path_factory.mktemp("base") / "run"
    train_to_completion(open_run(config(2, {}), str(folder), lambda line: None, make_program=program))
    return folder


def config(steps, overrides):
    often = {"train_tokens": f"{steps} steps", "checkpoint.save_every_steps": 2, "checkpoint.keep_last": 9}
    return tiny.config(WIDE | QUIET | often | overrides)


def tuned(folder, base, steps=4, stop_after=None, said=None, **overrides):
    """Fine-tunes in the folder, and returns its checkpoints."""
    data = folder.parent / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    chat = {"data.name": "chat", "data.files": str(data), "data.cache_dir": str(folder.parent / "cache")}
    cfg = config(steps, {"init.from_path": str(base)} | chat | overrides)
    said = [] if said is None else said
    run = open_run(cfg, str(folder), said.append, make_program=program)
    if stop_after is None:
        train_to_completion(run)
    else:
        loop.train(dataclasses.replace(run, total_steps=stop_after, finish=lambda state: None))
    return Checkpoints(folder / "checkpoints", CheckpointConfig())


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    """(checkpoints of 4 steps with adapters, what was said), not to be changed."""
    folder, said = tmp_path_factory.mktemp("adapted") / "tuned", []
    return tuned(folder, base, said=said, **LORA), said


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"], record["tokens_hash"]) for record in map(json.loads, lines)]


def restored(checkpoints, step, overrides):
    return tiny.host(checkpoints.restore(step, tiny.program(WIDE | overrides).abstract_state))


def leaves(tree):
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


@pytest.mark.soak
def test_a_run_with_adapters_begins_at_the_loss_of_a_full_one_and_goes_on_bit_for_bit(base, adapted, tmp_path):
    straight, said = adapted
    folder = straight.directory.parent
    tuned(tmp_path / "killed", base, stop_after=2, **LORA)
    killed = tuned(tmp_path / "killed", base, **LORA)
    tiny.assert_same_bits(restored(straight, 4, LORA), restored(killed, 4, LORA))
    assert losses(folder) == losses(tmp_path / "killed")
    tuned(tmp_path / "full", base, steps=2)
    (first, *_), (of_full, *_) = losses(folder), losses(tmp_path / "full")
    assert first == of_full  # the same rows, and B is 0
    assert any("parameters in rank-4 adapters; the rest are frozen" in line for line in said)
    assert (folder / "tokenizer/chat_template.jinja").read_text().startswith("{% for message in messages %}")

    before = leaves(restored(Checkpoints(base / "checkpoints", CheckpointConfig()), 2, {}).params)
    after = leaves(restored(straight, 4, LORA).params)
    assert all(np.array_equal(leaf, after[name]) for name, leaf in before.items())
    assert all(leaf.any() for name, leaf in after.items() if name.endswith(B))


def test_merged_weights_are_a_plain_work_folder_with_the_same_logits(base, adapted, tmp_path, capsys):
    run = adapted[0]
    shutil.copytree(run.directory.parent, tmp_path / "tuned")
    assert ckpt.main(["merge_lora", f"--workdir={tmp_path}/tuned", f"--to={tmp_path}/merged"]) == 0
    assert "step 4 with its adapters merged (12 leaves" in capsys.readouterr().out
    assert not verify_folder(tmp_path / "merged/checkpoints/4").damages
    written = json.loads((tmp_path / "merged/config.json").read_text())
    assert written["config"]["lora"]["rank"] == 0 and written["merged"]["lora"]["rank"] == 4
    assert (tmp_path / "merged/tokenizer/chat_template.jinja").exists()
    notes = [(tmp_path / name / "tokenizer/jaxscale.json").read_text() for name in ("tuned", "merged")]
    assert notes[0] == notes[1] and json.loads(notes[0])["chat"]["today"] == ""

    plain, adapted = tiny.program(WIDE), tiny.program(WIDE | LORA)
    wanted = {"params": plain.abstract_state.params}
    merged = Checkpoints(tmp_path / "merged/checkpoints", CheckpointConfig()).restore(4, wanted, partial=True)
    tokens_BT = tiny.packed_batch(5, rows=4, seq_len=32, vocab=256)
    ours = jax.jit(plain.model.token_losses)(merged["params"], tokens_BT)
    theirs = jax.jit(adapted.model.token_losses)(restored(run, 4, LORA).params, tokens_BT)
    before = restored(Checkpoints(base / "checkpoints", CheckpointConfig()), 2, {}).params
    untuned = jax.jit(plain.model.token_losses)(before, tokens_BT)
    real = tokens_BT.weights > 0
    np.testing.assert_allclose(ours[real], theirs[real], atol=1e-5)  # float32, summed in another order
    assert np.abs(np.asarray(ours - untuned))[real].max() > 1e-3
    opened = {name: open_model(str(tmp_path / name), say=(said := []).append) for name in ("merged", "tuned")}
    assert "float32, with adapters of rank 4; " in said[0]
    for model in opened.values():
        found = np.asarray(make_token_losses(model)(tokens_BT))[real]
        np.testing.assert_allclose(found, theirs[real], atol=1e-5)

    with pytest.raises(ValueError, match="merge the adapters with jaxscale ckpt merge_lora --workdir=.*/tuned --to"):
        convert.main([f"--workdir={tmp_path}/tuned", f"--to={tmp_path}/hf"])
    assert convert.main([f"--workdir={tmp_path}/merged", f"--to={tmp_path}/hf"]) == 0
    assert (tmp_path / "hf/chat_template.jinja").exists()
    with pytest.raises(ValueError, match="export.every_steps=2 would export weights without adapters"):
        config(4, LORA | {"export.every_steps": 2})

    on = tuned(tmp_path / "on", tmp_path / "merged", steps=2)  # a full run begins with them
    assert on.latest_step() == 2
    with pytest.raises(ValueError, match="is not empty"):
        merge_lora(run, 4, tmp_path / "merged")
    with pytest.raises(ValueError, match="has no LoRA adapters in params"):
        merge_lora(on, 2, tmp_path / "again")
    with pytest.raises(ValueError, match="not in this config .*merge_lora merges adapters"):
        tuned(tmp_path / "wrong", tmp_path / "tuned")


@pytest.mark.soak
def test_samples_of_a_run_are_those_of_its_merged_weights_and_not_of_its_base(base, tmp_path):
    run = tuned(tmp_path / "tuned", base, **LORA)
    state = restored(run, 4, LORA)
    merge_lora(run, 4, tmp_path / "merged")
    merged = Checkpoints(tmp_path / "merged/checkpoints", CheckpointConfig())
    plain = lambda checkpoints, step: checkpoints.restore(
        step, {"params": tiny.program(WIDE).abstract_state.params}, partial=True
    )["params"]
    before = plain(Checkpoints(base / "checkpoints", CheckpointConfig()), 2)
    texts = {}
    for name, params in (("tuned", state.params), ("merged", plain(merged, 4)), ("base", before)):
        sampled = tiny.program(WIDE | (LORA if name == "tuned" else {}))
        asked = SampleConfig(num_tokens=24, prompt="say a:", temperature=0.01, top_k=1)
        sampled = dataclasses.replace(sampled, cfg=dataclasses.replace(sampled.cfg, sample=asked))
        texts[name] = make_sample(sampled, load_tokenizer("bytes"))(state._replace(params=params))
    assert texts["tuned"] == texts["merged"] != texts["base"]


@pytest.mark.soak
def test_the_average_of_adapters_is_opened_with_the_base_that_has_none(base, tmp_path):
    settings = LORA | {"train.ema.decay": 0.5}
    run = tuned(tmp_path / "tuned", base, steps=2, **settings)
    model = open_model(str(tmp_path / "tuned"), what="ema", say=lambda line: None)
    state = restored(run, 2, settings)
    tiny.assert_same_bits(tiny.host(model.params), tiny.host(ema_params(state)))
    ends = {
        name for name, leaf in leaves(tiny.host(model.params)).items() if (leaf != leaves(state.params)[name]).any()
    }
    assert ends and all(map(is_adapter, ends))

    merge_lora(run, 2, tmp_path / "merged", what="ema")
    merged = open_model(str(tmp_path / "merged"), say=lambda line: None)
    tokens_BT = tiny.packed_batch(5, rows=4, seq_len=32, vocab=256)
    found, wanted, newest = (
        np.asarray(make_token_losses(one)(tokens_BT))
        for one in (merged, model, open_model(str(tmp_path / "tuned"), say=lambda line: None))
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)  # float32, summed in another order
    assert np.abs(found - newest).max() > 1e-4


def test_a_damaged_adapter_is_named(base, tmp_path):
    run = tuned(tmp_path / "tuned", base, steps=2, **LORA)
    record = json.loads((run.directory / "2/run/metadata").read_text())
    name = next(name for name in record["leaves"] if name.startswith("params/") and is_adapter(name))
    record["leaves"][name][2] ^= 1
    record.pop("sha256")
    (run.directory / "2/run/metadata").write_text(json.dumps(seal(record)))
    with pytest.raises(Stop, match=f"{name}: its bits differ") as stop:
        merge_lora(run, 2, tmp_path / "merged")
    assert stop.value.code == Exit.CHECKPOINT_CORRUPT
