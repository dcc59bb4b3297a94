"""Mixtures of experts in and out: each expert by itself or all of a layer in one tensor, bit for bit.

L layers  E experts  D embed  F width of an expert
"""

import json
import math

import jax
import numpy as np
import pytest
import tiny
from hf_folders import BFLOAT16, FLOAT32, LLAMA, assert_same, make_folder, read_folder, write_file
from test_family_settings import MIXTRAL, QWEN3_MOE
from test_peft import make_adapter

from jaxscale import schema
from jaxscale.build import make_program
from jaxscale.cli import convert
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.lora import A, B
from jaxscale.core.models.lora_mup_config import LoraConfig
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.checkpoint.branch import branch_state
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import nest
from jaxscale.tools.interop import families
from jaxscale.tools.interop.adapters import adapter_of_run
from jaxscale.tools.interop.chunking import CHUNK_BYTES, array_shapes, chunk_shapes, plan_units

SMALL_MIXTRAL = LLAMA | dict(
    model_type="mixtral", architectures=["MixtralForCausalLM"], intermediate_size=24, num_local_experts=3,
    num_experts_per_tok=2,
)  # fmt: skip
SMALL_QWEN3 = LLAMA | dict(
    model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=5, num_experts_per_tok=3, head_dim=6,
    moe_intermediate_size=12, mlp_only_layers=[0], norm_topk_prob=True,
)  # fmt: skip
SMALL_OLMOE = LLAMA | dict(
    model_type="olmoe", architectures=["OlmoeForCausalLM"], intermediate_size=10, num_experts=4, num_experts_per_tok=2,
)  # fmt: skip
SMALL_DEEPSEEK = LLAMA | dict(
    model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], num_key_value_heads=4, q_lora_rank=6,
    kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, first_k_dense_replace=1, n_routed_experts=6,
    num_experts_per_tok=2, n_group=3, topk_group=2, moe_intermediate_size=12, num_nextn_predict_layers=0,
)  # fmt: skip


def bring_in(hf, run):
    assert convert.main([f"--from={hf}", f"--workdir={run}"]) == 0
    return Checkpoints(run / "checkpoints", CheckpointConfig())


def take_out(run, to, *flags):
    assert convert.main([f"--workdir={run}", f"--to={to}", *flags]) == 0
    return read_folder(to)


def leaves_of(checkpoints, step=0):
    """{leaf: values}"""
    told = checkpoints.read_record(step)["leaves"]
    wanted = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype, _) in told.items()}
    return {name: np.asarray(values) for name, values in checkpoints.restore(step, wanted).items()}


def joined(values, layers, names=("gate_proj", "up_proj", "down_proj"), first="gate_proj"):
    """The tensors as transformers 5 holds them: of a layer [E, gate's F then up's, D] and [E, D, F]."""
    gate, up, down = names
    found = dict(values)
    for layer in layers:
        before = next(name.partition("experts.0")[0] for name in values if f".{layer}." in name and "experts.0" in name)
        number = sum(name.startswith(before) and name.endswith(f"{gate}.weight") for name in values)
        take = lambda name, expert: found.pop(f"{before}experts.{expert}.{name}.weight")  # noqa: B023
        experts = [{name: take(name, expert) for name in names} for expert in range(number)]
        after = before.replace("block_sparse_moe", "mlp")
        halves = [gate, up] if first == "gate_proj" else [up, gate]
        both = [np.concatenate([expert[half] for half in halves]) for expert in experts]
        found[f"{after}experts.gate_up_proj"] = np.stack(both)
        found[f"{after}experts.down_proj"] = np.stack([expert[down] for expert in experts])
        found[f"{after}gate.weight"] = found.pop(f"{before}gate.weight")
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("config", "dtype", "files"),
    [
        (SMALL_MIXTRAL, BFLOAT16, 3),
        (SMALL_QWEN3, FLOAT32, 2),
        (SMALL_OLMOE, FLOAT32, 1),
        (SMALL_DEEPSEEK, BFLOAT16, 2),
    ],
    ids=["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"],
)
def test_the_round_trip_is_exact(tmp_path, config, dtype, files):
    values = make_folder(tmp_path / "hf", config, dtype, files)
    checkpoints = bring_in(tmp_path / "hf", tmp_path / "run")
    assert_same(take_out(tmp_path / "run", tmp_path / "out", f"--dtype={dtype.name}", "--shard_bytes=4000"), values)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written[key] for key in config} == config
    dense = config.get("first_k_dense_replace", len(config.get("mlp_only_layers", [])))
    number = next(config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config)
    leaves, even_LE = leaves_of(checkpoints), np.full((3 - dense, number), 1 / number, "f4")
    np.testing.assert_array_equal(leaves["params/blocks/mlp/router_load"], even_LE)
    gate_LEDF = leaves["params/blocks/mlp/gate"]
    assert gate_LEDF.shape[:3] == (3 - dense, number, 16)
    of_gate = "block_sparse_moe.experts.1.w1" if "mixtral" in config["model_type"] else "mlp.experts.1.gate_proj"
    np.testing.assert_array_equal(gate_LEDF[-1, 1], np.float32(values[f"model.layers.2.{of_gate}.weight"].T))
    if dense:
        up_LDF = leaves["params/dense_blocks/mlp/up"]
        np.testing.assert_array_equal(up_LDF, values["model.layers.0.mlp.up_proj.weight"].T[None])


@pytest.mark.cases(1)
@pytest.mark.parametrize("config", [SMALL_MIXTRAL, SMALL_QWEN3], ids=["mixtral", "qwen3_moe"])
def test_experts_of_a_layer_in_one_tensor_are_the_same_as_each_by_itself(tmp_path, config):
    values = make_folder(tmp_path / "hf", config, FLOAT32)
    names = ("w1", "w3", "w2") if config is SMALL_MIXTRAL else ("gate_proj", "up_proj", "down_proj")
    layers = range(len(config.get("mlp_only_layers", [])), 3)
    apart, found = bring_in(tmp_path / "hf", tmp_path / "apart"), {}
    for first in ("gate_proj", "up_proj"):
        folder = tmp_path / first
        (folder / "hf").mkdir(parents=True)
        (folder / "hf" / "config.json").write_text(json.dumps(config))
        write_file(folder / "hf" / "model.safetensors", joined(values, layers, names, first))
        found[first] = leaves_of(bring_in(folder / "hf", folder / "run"))
    np.testing.assert_equal(found["gate_proj"], leaves_of(apart))
    gate, up = (f"params/blocks/mlp/{name}" for name in ("gate", "up"))
    np.testing.assert_array_equal(found["up_proj"][gate], found["gate_proj"][up])  # the order is what tells them apart
    assert_same(take_out(tmp_path / "gate_proj" / "run", tmp_path / "out", "--dtype=float32"), values)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.update({"model.layers.1.mlp.experts.down_proj": np.zeros((4, 16, 12), "f4")}),
         r"down_proj has shape \[4, 16, 12\], but config.json requires 5 experts: \[experts, out"),
        (lambda t: t.update({"model.layers.1.mlp.experts.gate_up_proj": np.zeros((5, 16, 24), "f4")}),
         r"experts.0.gate_proj.weight has shape \[8, 24\], but config.json requires \[12, 16\]"),  # turned
        (lambda t: t.update({"model.layers.1.mlp.experts.gate_up_proj": np.zeros((5, 23, 16), "f4")}),
         r"has shape \[5, 23, 16\], but config.json requires 5 experts and 2 matrices per expert"),
        (lambda t: t.update({"model.layers.1.mlp.experts.gate_up_proj": np.zeros((5,), "f4")}), r"has shape \[5\]"),
        (lambda t: t.update({"model.layers.1.mlp.experts.4.up_proj.weight": np.zeros((12, 16), "f4")}),
         "has model.layers.1.mlp.experts.4.up_proj.weight twice .two names, or separate and fused.; remove one"),
        (lambda t: t.update({"model.layers.0.mlp.experts.down_proj": np.zeros((5, 16, 12), "f4")}),
         "has model.layers.0.mlp.experts.0.down_proj.weight.* and 2 more, which qwen3_moe with this config.json does"),
        (lambda t: t.pop("model.layers.2.mlp.experts.gate_up_proj"),
         "has no model.layers.2.mlp.experts.0.gate_proj.weight, .* and 7 more, which config.json requires"),
        (lambda t: t.update({"model.layers.1.mlp.shared_expert_gate.weight": np.zeros((1, 16), "f4")}),
         "has model.layers.1.mlp.shared_expert_gate.weight, which qwen3_moe with this config.json does not have"),
    ],
)  # fmt: skip
def test_experts_that_are_not_those_of_the_config_are_refused(tmp_path, change, told):
    tensors = joined(make_folder(tmp_path / "hf", SMALL_QWEN3, FLOAT32), (1, 2))
    change(tensors)
    write_file(tmp_path / "hf" / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=told) as caught:
        bring_in(tmp_path / "hf", tmp_path / "run")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_trained_mixture_goes_out_and_comes_back(tmp_path, scan):
    """Written by Orbax from eight devices, in pieces that hold several layers and experts."""
    wide = dict(embed_dim=64, head_dim=16, qk_norm=True, scan_layers=scan, num_layers=3)
    cfg = tiny.config({"model": tiny.LLAMA | wide | dict(experts=dict(number=6, chosen=2, mlp_dim=40, first_dense=1))})
    family = families.family_for(cfg.model)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng, params = np.random.default_rng(0), {}
    for name, shape in (
        array_shapes(families.tensors(family, cfg.model)) | families.untracked_leaves(cfg.model)
    ).items():
        axes = [None] * (len(shape) - 2) + ["fsdp", "tensor"] if len(shape) > 1 else [None]
        if name.endswith("mlp/down") and "dense" not in name:
            axes = [None] * (len(shape) - 3) + ["tensor", None, "fsdp"]  # half of the experts
        axes = [axis if axis and size % 4 == 0 or axis == "tensor" else None for axis, size in zip(axes, shape)]
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        params[name] = jax.device_put(rng.standard_normal(shape, np.float32), place)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig())
    checkpoints.save(7, {"params": nest(params)}, {"config": schema.to_dict(cfg)}, wait=True)
    checkpoints.close()
    found = take_out(tmp_path / "run", tmp_path / "out", "--dtype=float32")
    gate = params["blocks/mlp/gate"][1] if scan else params["blocks/1/mlp/gate"]
    np.testing.assert_array_equal(found["model.layers.2.mlp.experts.5.gate_proj.weight"], gate[5].T)
    marks = lambda run, step: {
        name: told for name, told in run.read_record(step)["leaves"].items() if "params/" in name and "load" not in name
    }
    again = bring_in(tmp_path / "out", tmp_path / "again")
    if scan:
        assert marks(again, 0) == marks(checkpoints, 7)


def test_one_expert_is_in_memory_at_a_time_or_as_many_as_make_a_piece():
    for hf, experts in ((MIXTRAL, 1), (QWEN3_MOE, 4)):
        family, cfg, _ = families.read(hf)
        pairs = families.tensors(family, cfg)
        chunks, units = chunk_shapes(pairs), plan_units(pairs)
        assert chunks["blocks/mlp/gate"][:2] == (1, experts)
        assert max(math.prod(shape) for shape in chunks.values()) * 4 <= CHUNK_BYTES
        own = [unit for unit in units.values() if unit[0].leaves == ("blocks/mlp/up",)]
        assert {len(unit) for unit in own} == {experts}
        assert [pair.place for unit in own for pair in unit] == list(np.ndindex(cfg.num_layers, cfg.experts.number))
        assert sum(map(len, units.values())) == len(pairs)


def test_layers_of_small_experts_lie_together(tmp_path):
    family, cfg, _ = families.read(SMALL_QWEN3)
    pairs = families.tensors(family, cfg)
    assert chunk_shapes(pairs)["blocks/mlp/down"] == (2, 5, 12, 16)
    assert chunk_shapes(pairs)["dense_blocks/mlp/down"] == (1, 40, 16)
    number = len({pair.leaves for pair in pairs})
    assert len(plan_units(pairs)) == number


@pytest.mark.soak
def test_a_mixture_begins_a_run(tmp_path):
    config = SMALL_QWEN3 | dict(vocab_size=tiny.VOCAB, intermediate_size=32, num_experts=4)
    values = make_folder(tmp_path / "hf", config, FLOAT32)
    bring_in(tmp_path / "hf", tmp_path / "run")
    _, cfg, _ = families.read(config)
    model = schema.to_dict(cfg) | {"compute_dtype": "float32", "attention": "xla"}
    run = tiny.config({"model": model, "init.from_path": str(tmp_path / "run"), "mesh.fsdp": 2})
    program = make_program(run, resolve_budget(run, None), jax.devices()[:2])
    state = branch_state(program, program.cfg.init, lambda line: None)
    up_LEDF = np.asarray(state.params["blocks"]["mlp"]["up"])
    np.testing.assert_array_equal(up_LEDF[1, 3], values["model.layers.2.mlp.experts.3.up_proj.weight"].T)
    assert np.all(np.asarray(state.params["blocks"]["mlp"]["router_load"]) == 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL_MIXTRAL, SMALL_QWEN3], ids=["mixtral", "qwen3_moe"])
def test_adapters_of_experts_are_merged_and_never_kept_beside(tmp_path, config):
    values = make_folder(tmp_path / "base", config, FLOAT32)
    kinds = ("q_proj", "w1", "gate_proj", "w2")
    modules = [name.removesuffix(".weight") for name in values if name.rpartition(".")[0].endswith(kinds)]
    found = make_adapter(tmp_path / "adapter", {module: values[f"{module}.weight"].shape for module in modules})
    flags = [f"--from={tmp_path / 'adapter'}", f"--base={tmp_path / 'base'}"]
    assert convert.main([*flags, f"--workdir={tmp_path / 'run'}"]) == 0
    merged = take_out(tmp_path / "run", tmp_path / "out", "--dtype=float32")
    assert len(found) > 12
    for module, (a, b) in found.items():
        wanted = values[f"{module}.weight"] + 6 / 4 * (b.astype(np.float64) @ a.astype(np.float64))
        np.testing.assert_array_equal(merged.pop(f"{module}.weight"), wanted.astype(np.float32))
    assert_same(merged, {name: values[name] for name in merged})
    with pytest.raises(ValueError, match="adapts (experts, which LoRA cannot train|dense_blocks.*); omit"):
        convert.main([*flags, f"--workdir={tmp_path / 'start'}", "--adapter"])


def test_adapters_of_attention_stay_beside_and_those_of_joined_experts_are_refused(tmp_path):
    values = make_folder(tmp_path / "base", SMALL_MIXTRAL, FLOAT32)
    modules = [name.removesuffix(".weight") for name in values if "_proj" in name]
    make_adapter(tmp_path / "adapter", {module: values[f"{module}.weight"].shape for module in modules})
    flags = [f"--from={tmp_path / 'adapter'}", f"--base={tmp_path / 'base'}"]
    assert convert.main([*flags, f"--workdir={tmp_path / 'run'}", "--adapter"]) == 0
    assert convert.main([f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}", "--adapter"]) == 0
    assert sorted(read_folder(tmp_path / "out")) == sorted(read_folder(tmp_path / "adapter"))
    file = tmp_path / "adapter" / "adapter_config.json"  # as PEFT 0.21 has it of transformers 5
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_parameters": ["gate.weight", "gate_up_proj"]}))
    with pytest.raises(ValueError, match="target_parameters=.* is not supported; merge the adapter"):
        convert.main([*flags, f"--workdir={tmp_path / 'joined'}"])


@pytest.mark.slow
def test_adapters_of_what_rope_turns_come_in_and_go_out_in_the_order_of_each(tmp_path):
    values = make_folder(tmp_path / "base", SMALL_DEEPSEEK | dict(first_k_dense_replace=0), FLOAT32)
    modules = [name.removesuffix(".weight") for name in values if name.endswith(("q_b_proj.weight", "mqa.weight"))]
    make_adapter(tmp_path / "adapter", {module: values[f"{module}.weight"].shape for module in modules})
    flags = [f"--from={tmp_path / 'adapter'}", f"--base={tmp_path / 'base'}"]
    assert convert.main([*flags, f"--workdir={tmp_path / 'run'}", "--adapter"]) == 0
    found = leaves_of(Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig()))
    given = read_folder(tmp_path / "adapter")
    b_Or = given["base_model.model.model.layers.2.self_attn.q_b_proj.lora_B.weight"]
    b_rNH = found[f"params/blocks/attention/wq_up{B}"][2]
    np.testing.assert_array_equal(b_rNH[:, 1], b_Or.T[:, 10:20][:, [0, 1, 2, 3, 4, 5, 6, 8, 7, 9]])  # halves of pairs
    assert (
        convert.main([f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}", "--adapter", "--dtype=float32"]) == 0
    )
    assert_same(read_folder(tmp_path / "out"), given)


@pytest.mark.parametrize(
    ("experts", "leaf", "told"),
    [
        (dict(), "blocks/mlp/down", "blocks/mlp/down has an adapter, but adapters of experts .*; merge it"),
        (dict(first_dense=1), "blocks/attention/wq", "layers without experts have no adapters"),
    ],
)
def test_adapters_that_peft_could_not_be_told_of_are_not_exported(experts, leaf, told):
    own = dict(number=4, chosen=2, mlp_dim=8) | experts
    cfg = schema.from_dict(LlamaConfig, tiny.LLAMA | dict(qk_norm=True, experts=own))
    has = {f"{leaf}{A}", f"{leaf}{B}"}.__contains__
    with pytest.raises(ValueError, match=told):
        adapter_of_run(families.family_for(cfg), cfg, LoraConfig(rank=2), has, "base")
