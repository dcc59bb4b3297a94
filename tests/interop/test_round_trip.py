"""What comes in goes out again bit for bit, is a checkpoint like any other, and restores on any mesh."""

import json

import jax
import numpy as np
import pytest
import tiny
from hf_folders import BFLOAT16, FLOAT32, GPT2, LLAMA, assert_same, make_folder, read_folder, write_file

from jaxscale import config as run_config
from jaxscale import schema
from jaxscale.cli import convert
from jaxscale.runtime.checkpoint.branch import InitSource, branch_state
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import nest
from jaxscale.runtime.checkpoint.verify import verify_folder
from jaxscale.runtime.run.opening import open_run
from jaxscale.system.exits import Exit, Stop
from jaxscale.tools.interop import families
from jaxscale.tools.interop.chunking import array_shapes
from jaxscale.tools.interop.exporting import hf_origin

FLOAT16 = np.dtype("<f2")


def bring_in(hf, run):
    assert convert.main([f"--from={hf}", f"--workdir={run}"]) == 0
    return Checkpoints(run / "checkpoints", CheckpointConfig())


def take_out(run, to, *flags):
    assert convert.main([f"--workdir={run}", f"--to={to}", *flags]) == 0
    return read_folder(to)


@pytest.mark.parametrize(
    ("config", "dtype", "files"), [(LLAMA, BFLOAT16, 3), (LLAMA, FLOAT32, 1), (GPT2, FLOAT32, 2), (GPT2, BFLOAT16, 1)]
)
def test_the_round_trip_is_exact(tmp_path, config, dtype, files):
    values = make_folder(tmp_path / "hf", config, dtype, files)
    bring_in(tmp_path / "hf", tmp_path / "run")
    found = take_out(tmp_path / "run", tmp_path / "out", f"--dtype={dtype.name}", "--shard_bytes=4000")
    assert_same(found, values)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(values) and len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in values.values())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["torch_dtype"] == dtype.name
    assert {key: written[key] for key in config if key in written} == {k: config[k] for k in config if k in written}
    assert not list((tmp_path / "out").glob(".*"))


def test_a_mistral_without_a_window_goes_out_as_one_and_so_does_what_was_trained_from_it(tmp_path, capfd):
    mistral = LLAMA | dict(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=None)
    make_folder(tmp_path / "hf", mistral | dict(auto_map={"AutoModel": "code.Mine"}, sliding_windows=3))
    checkpoints = bring_in(tmp_path / "hf", tmp_path / "run")
    said = capfd.readouterr().err
    assert "sliding_windows, which mistral does not use" in said and "custom code (auto_map)" in said
    take_out(tmp_path / "run", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("mistral", ["MistralForCausalLM"])
    ancestry = InitSource(checkpoints, 0, checkpoints.read_record(0)).ancestry
    assert hf_origin({"ancestry": [{"path": "runs/between", "step": 3, "sha256": ""}, *ancestry]}) == ancestry[0]
    assert ancestry[0]["model_type"] == "mistral" and ancestry[0]["kept"]["bos_token_id"] == 1


def test_float16_comes_in_exactly_and_one_file_needs_no_index(tmp_path):
    values = make_folder(tmp_path / "hf", LLAMA, FLOAT16)
    bring_in(tmp_path / "hf", tmp_path / "run")
    found = take_out(tmp_path / "run", tmp_path / "out", "--dtype=float32")
    assert_same(found, {name: value.astype(np.float32) for name, value in values.items()})
    names = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


def test_what_is_not_finite_is_told_and_kept(tmp_path, capsys):
    values = make_folder(tmp_path / "hf")
    values["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    write_file(tmp_path / "hf" / "model.safetensors", values)
    bring_in(tmp_path / "hf", tmp_path / "run")
    assert "WARNING: model.layers.1.mlp.up_proj.weight of" in capsys.readouterr().err
    assert_same(take_out(tmp_path / "run", tmp_path / "out"), values)


def test_it_is_a_checkpoint_like_any_other(tmp_path, capsys):
    values = make_folder(tmp_path / "hf", LLAMA, FLOAT32)
    checkpoints = bring_in(tmp_path / "hf", tmp_path / "run")
    assert "start training from it with --init_from=" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", "config.json"]
    assert checkpoints.all_steps() == [0] and verify_folder(checkpoints.directory / "0").damages == ()
    record = checkpoints.read_record(0)
    assert record["run"]["converted"]["model_type"] == "llama" and record["health"] == "clean"
    cfg = schema.from_dict(run_config.RunConfig, json.loads((tmp_path / "run" / "config.json").read_text())["config"])
    assert (cfg.model.num_layers, cfg.model.vocab_size, cfg.seq_len) == (3, 96, 64)
    gate = np.stack([values[f"model.layers.{layer}.mlp.gate_proj.weight"].T for layer in range(3)])
    wanted = {"params/blocks/mlp/gate": jax.ShapeDtypeStruct(gate.shape, np.float32)}
    np.testing.assert_array_equal(checkpoints.restore(0, wanted, partial=True)["params/blocks/mlp/gate"], gate)


@pytest.mark.parametrize(
    "mesh", [{"fsdp": 2, "tensor": 2, "data": 2}, pytest.param({"fsdp": 8}, marks=pytest.mark.soak)], ids=str
)
def test_a_run_on_any_mesh_begins_with_it(tmp_path, mesh):
    """The two commands of continued pretraining, the second one up to its first step."""
    values = make_folder(tmp_path / "hf", LLAMA | {"vocab_size": tiny.VOCAB, "intermediate_size": 32}, FLOAT32)
    bring_in(tmp_path / "hf", tmp_path / "run")
    overrides = {"model.num_layers": 3, "model.head_dim": 4, "init.from_path": str(tmp_path / "run")}
    program = tiny.program(overrides | {f"mesh.{name}": size for name, size in mesh.items()}, num_devices=8)
    said = []
    state = branch_state(program, program.cfg.init, said.append)
    np.testing.assert_array_equal(state.params["head"], values["lm_head.weight"].T)
    for layer in range(3):
        mine = np.asarray(state.params["blocks"]["attention"]["wo"])[layer]
        theirs = values[f"model.layers.{layer}.self_attn.o_proj.weight"]
        np.testing.assert_array_equal(mine.reshape(16, 16), theirs.T)
    assert any(line.startswith("init: params of") for line in said)


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_trained_state_goes_out_and_comes_back(tmp_path, scan):
    """Written by Orbax from eight devices, in pieces that hold all layers, with the average beside it."""
    wider = {"model.embed_dim": 64, "model.mlp_dim": 256}  # pieces of 1 KB and less lie in the index
    cfg = tiny.config({"model.scan_layers": scan, "train.ema.decay": 0.9} | wider)
    family = families.family_for(cfg.model)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng, params = np.random.default_rng(0), {}
    for name, shape in array_shapes(families.tensors(family, cfg.model)).items():
        axes = [None] * (len(shape) - 2) + ["fsdp", "tensor"] if len(shape) > 1 else [None]
        axes = [axis if axis and size % 4 == 0 else None for axis, size in zip(axes, shape)]
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        params[name] = jax.device_put(rng.standard_normal(shape, np.float32), place)
    average = {name: jax.device_put(np.asarray(leaf) * np.float32(0.5), leaf.sharding) for name, leaf in params.items()}
    del average["final_norm"]  # frozen
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig())
    checkpoints.save(7, {"params": nest(params), "ema": nest(average)}, {"config": schema.to_dict(cfg)}, wait=True)
    checkpoints.close()
    found = take_out(tmp_path / "run", tmp_path / "out", "--dtype=float32")
    halved = take_out(tmp_path / "run", tmp_path / "ema", "--dtype=float32", "--ema", "--step=7")
    kept = {"model.norm.weight": found["model.norm.weight"]}
    assert_same(halved, {name: value * np.float32(0.5) for name, value in found.items()} | kept)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["max_position_embeddings"], written["vocab_size"]) == (tiny.SEQ_LEN, tiny.VOCAB)
    again = bring_in(tmp_path / "out", tmp_path / "again")
    mark = lambda run, step: {name: told for name, told in run.read_record(step)["leaves"].items() if "params/" in name}
    if scan:
        assert mark(again, 0) == mark(checkpoints, 7)


def test_what_is_trained_on_keeps_the_length_and_the_ends_that_its_model_came_with(tmp_path):
    values = make_folder(tmp_path / "hf", LLAMA | {"max_position_embeddings": 4096}, FLOAT32)
    base = bring_in(tmp_path / "hf", tmp_path / "base")
    begun = InitSource(base, 0, base.read_record(0)).ancestry
    again = InitSource(base, 1, {"sha256": "of the first run", "run": {"ancestry": begun}}).ancestry  # a run of a run
    config = base.read_record(0)["run"]["config"]
    params = base.restore(0, {n: jax.ShapeDtypeStruct(s, d) for n, (s, d, _) in base.read_record(0)["leaves"].items()})
    for name, ancestry, seq_len, longest in (("one", begun, 64, 4096), ("two", again, 8192, 8192)):
        run = {"config": config | {"seq_len": seq_len, "data": {"name": "tokens"}}, "ancestry": ancestry}
        trained = Checkpoints(tmp_path / name / "checkpoints", CheckpointConfig())
        trained.save(3, nest(params), run, wait=True)
        trained.close()
        assert_same(take_out(tmp_path / name, tmp_path / f"{name}-out", "--dtype=float32"), values)
        written = json.loads((tmp_path / f"{name}-out" / "config.json").read_text())
        assert written["max_position_embeddings"] == longest
        assert (written["bos_token_id"], written["eos_token_id"], written["torch_dtype"]) == (1, 2, "float32")


@pytest.mark.fault("F2")
def test_a_bit_that_changed_on_the_disk_is_found_before_the_export_counts(tmp_path):
    make_folder(tmp_path / "hf", LLAMA | {"intermediate_size": 400}, FLOAT32)
    checkpoints = bring_in(tmp_path / "hf", tmp_path / "run")
    data = max((checkpoints.directory / "0" / "state" / "d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 16
    data.write_bytes(content)
    with pytest.raises(Stop, match="params/.* differs from the fingerprint") as caught:
        convert.main([f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"])
    assert caught.value.code == Exit.CHECKPOINT_CORRUPT and not (tmp_path / "out" / "config.json").exists()


def test_a_folder_in_use_is_never_written_to(tmp_path):
    make_folder(tmp_path / "hf")
    bring_in(tmp_path / "hf", tmp_path / "run")
    with pytest.raises(ValueError, match="run is not empty: it contains checkpoints; give a new folder"):
        bring_in(tmp_path / "hf", tmp_path / "run")
    take_out(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ValueError, match="out is not empty: it contains config.json; give a new folder"):
        take_out(tmp_path / "run", tmp_path / "out")


def test_it_is_no_run_to_go_on_with(tmp_path):
    make_folder(tmp_path / "hf")
    bring_in(tmp_path / "hf", tmp_path / "run")
    with pytest.raises(
        Stop, match="contains a converted model, not a run; .* --init_from=.*run and another --workdir"
    ) as caught:
        open_run(tiny.config(), str(tmp_path / "run"), lambda line: None)
    assert caught.value.code == Exit.CONFIG_MISMATCH


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--workdir=x"], "convert needs either --from=FOLDER, to import a model, or --to=FOLDER"),
        (["--from=a", "--to=b"], "needs either --from=FOLDER"),
        (["--from=a"], "convert needs --workdir=FOLDER"),
        (["--from=a", "--workdir=b", "--dtype=float32"], "--dtype applies only to exports"),
        (["--from=a", "--workdir=b", "--ema"], "--ema applies only to exports"),
        (["--workdir=a", "--to=b", "--dtype=float8"], "--dtype=float8 must be bfloat16 or float32"),
        (["--workdir=nothing", "--to=b"], "nothing has no checkpoint; give the work folder of a run"),
        (["--workdir=a", "--to=b", "--config=c"], "the settings are read from the model's config.json"),
        (
            ["--workdir=a", "--to=b", "--push=alone"],
            "push='alone' must be a Hugging Face Hub repository, written as OWNER/NAME",
        ),
    ],
)
def test_flags_that_say_nothing_are_refused(flags, told):
    with pytest.raises(ValueError, match=told):
        convert.main(flags)


def test_steps_weights_and_sizes_that_are_not_there_are_named(tmp_path):
    make_folder(tmp_path / "hf")
    bring_in(tmp_path / "hf", tmp_path / "run")
    to = [f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"]
    for flag, told in (
        ("--step=5", "--step=5 does not exist; available steps: 0"),
        ("--ema", "step 0 has no ema; set train.ema.decay"),
        ("--shard_bytes=5,0e9", "--shard_bytes=5,0e9 must be a number of bytes, such as 5e9"),
        ("--shard_bytes=0", "--shard_bytes=0 must be a number of bytes, such as 5e9"),
    ):
        with pytest.raises(ValueError, match=told):
            convert.main([*to, flag])
