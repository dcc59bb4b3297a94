"""What is opened out of a work folder is what was trained, wherever it is put. B batch  T position"""

import json
import shutil

import jax
import jax.numpy as jnp
import made_model
import numpy as np
import pytest
import tiny
from gcs_emulator import Emulator
from token_losses import make_token_losses

from jaxscale import schema
from jaxscale.api.inference import at_step, kind_of, open_model
from jaxscale.cli.sample import read_prompts
from jaxscale.core.config import MeshConfig
from jaxscale.core.models import AnyModelConfig
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.system.exits import Exit, Stop

FROZEN = [{"pattern": "final_norm", "frozen": True}]
QUIET = dict(say=lambda line: None)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    program = made_model.make_workdir(folder, {"train.ema.decay": 0.5, "optim.groups": FROZEN}, steps=(3, 7))
    return folder, program


@pytest.mark.slow
def test_the_newest_step_comes_as_it_was_saved_with_its_tokenizer(workdir):
    folder, program = workdir
    said = []
    model = open_model(str(folder), say=said.append)
    saved = Checkpoints(folder / "checkpoints", CheckpointConfig()).restore(7, program.abstract_state)
    tiny.assert_same_bits(tiny.host(model.params), tiny.host(saved.params))
    assert (model.step, model.seq_len, model.tokenizer.name) == (7, tiny.SEQ_LEN, "bytes")
    assert model.saved_tokenizer.tokenizer.begin_ids == () and model.saved_tokenizer.stop_ids == (256,)
    assert model.kept is model.saved_tokenizer  # the old name
    assert said == [f"{folder}/checkpoints/7: llama, 14.5K parameters, float32; fsdp=8"]


@pytest.mark.parametrize(
    "settings, run, told",
    [
        (tiny.LLAMA, {}, "llama"),
        (tiny.LLAMA | {"qk_norm": True}, {"converted": {"model_type": "qwen3"}}, "qwen3 (llama layout)"),
        (tiny.LLAMA, {"converted": {"model_type": "llama"}}, "llama"),
        (tiny.LLAMA | {"qk_norm": True}, {"converted": None}, "llama with the settings of qwen3"),
        (tiny.LLAMA | {"qkv_bias": True, "logit_softcap": 8.0}, {}, "llama"),  # of no family
        (tiny.GPT2, {}, "gpt2"),
        (tiny.T5, {}, "t5"),
    ],
)
def test_a_model_is_called_what_it_is(settings, run, told):
    assert kind_of(schema.convert(settings, AnyModelConfig, "model"), run) == told


@pytest.mark.parametrize("where", ["--step", "path"])
def test_an_older_step_and_the_average_can_be_named(workdir, where):
    folder, program = workdir
    how = dict(path=str(folder), step=3) if where == "--step" else dict(path=f"{folder}/checkpoints/3")
    model, average = open_model(**how, **QUIET), open_model(**how, what="ema", **QUIET)
    assert model.step == average.step == 3
    whole = tiny.host(model.params)
    halves = jax.tree.map(lambda leaf: leaf / 2, whole) | {"final_norm": whole["final_norm"]}  # frozen: no average
    tiny.assert_same_bits(tiny.host(average.params), halves)


def test_a_model_is_opened_out_of_a_bucket_and_prompts_are_read_there(workdir, monkeypatch):
    folder, _ = workdir
    with Emulator() as bucket:
        for name, value in bucket.environment().items():
            monkeypatch.setenv(name, value)
        for path in folder.rglob("*"):
            if path.is_file():
                bucket.put("bucket", f"run/{path.relative_to(folder)}", path.read_bytes())
        bucket.put("bucket", "prompts.txt", "é\nb\n".encode())
        model = open_model("gs://bucket/run", step=3, **QUIET)
        newest = at_step(model, 7)
        assert read_prompts([], "gs://bucket/prompts.txt") == ["é", "b"]
    assert (model.path, newest.path) == ("gs://bucket/run/checkpoints/3", "gs://bucket/run/checkpoints/7")
    assert model.tokenizer.name == "bytes" and model.saved_tokenizer.stop_ids == (256,)
    for found in (model, newest):
        tiny.assert_same_bits(
            tiny.host(found.params), tiny.host(open_model(str(folder), step=found.step, **QUIET).params)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, pytest.param({"fsdp": 8}, marks=pytest.mark.soak)], ids=str
)
def test_losses_are_those_of_training_on_any_mesh_and_for_rows_that_it_does_not_divide(workdir, mesh):
    folder, program = workdir
    model = open_model(str(folder), mesh=MeshConfig(**mesh), **QUIET)
    batch = tiny.packed_batch(0, vocab=258)
    wanted_BT = np.where(batch.weights > 0, program.model.token_losses(jax.device_get(model.params), batch), 0)
    odd = jax.tree.map(lambda x_BT: x_BT[:5, :13], batch)
    found_BT = make_token_losses(model)(odd)
    np.testing.assert_allclose(found_BT, wanted_BT[:5, :13], rtol=1e-5, atol=1e-6)  # sums in another order


@pytest.mark.slow
def test_a_model_may_compute_in_another_type_and_be_saved_in_another(workdir, tmp_path):
    folder, program = workdir
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), open_model(str(folder), **QUIET).params)
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    checkpoints.save(0, {"params": half}, {"config": json.loads((folder / "config.json").read_text())["config"]})
    checkpoints.wait()
    shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer")
    model = open_model(str(tmp_path), compute_dtype="bfloat16", **QUIET)
    tiny.assert_same_bits(tiny.host(model.params), tiny.host(half))
    assert model.cfg.compute_dtype == "bfloat16"
    batch = tiny.packed_batch(0, vocab=258)
    exact_BT = make_token_losses(open_model(str(folder), **QUIET))(batch)
    np.testing.assert_allclose(make_token_losses(model)(batch), exact_BT, atol=0.1)  # 8 bits of mantissa


@pytest.mark.parametrize(
    "how, told",
    [
        (
            {"path": "{}/nowhere"},
            "--workdir=.*nowhere contains no checkpoint: .* has no saved step; use a different run$",
        ),
        ({"step": 5}, "has no step 5; use step 3 or 7"),
        ({"path": "{}/checkpoints/3", "step": 7}, "is the checkpoint of step 3, but step=7 is set"),
        ({"mesh": MeshConfig(tensor=8)}, "the mesh does not divide the model: .*kv_heads=2"),
    ],
)
def test_what_cannot_be_opened_is_told_in_a_line(workdir, how, told):
    how = {"path": "{}"} | how
    with pytest.raises(ValueError, match=told) as caught:
        open_model(**how | {"path": how["path"].format(workdir[0])}, **QUIET)
    assert "\n" not in str(caught.value)


def test_an_average_that_was_not_kept_and_a_changed_array_are_told(workdir, tmp_path):
    made_model.make_workdir(tmp_path / "plain")
    with pytest.raises(ValueError, match="has no 'ema', only .*params"):
        open_model(str(tmp_path / "plain"), what="ema", **QUIET)
    record = tmp_path / "plain/checkpoints/3/run/metadata"
    record.write_text(record.read_text().replace('"seed": 1', '"seed": 2').replace('"seed":1', '"seed":2'))
    with pytest.raises(Stop) as stop:
        open_model(str(tmp_path / "plain"), **QUIET)
    assert stop.value.code == Exit.CHECKPOINT_CORRUPT
