"""A dense model becomes a mixture that computes what it did, or says in one line why it will not."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny
from hf_folders import FLOAT32, make_folder, read_folder
from hf_folders import LLAMA as HF_LLAMA

from jaxscale import schema
from jaxscale.build import make_program
from jaxscale.cli import convert
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.checkpoint.branch import branch_state, open_source
from jaxscale.runtime.checkpoint.config import CheckpointConfig, InitConfig
from jaxscale.runtime.checkpoint.conversions import plan_upcycling
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import named_leaves
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop import families

DENSE = tiny.LLAMA | dict(num_layers=3)
COPY = dict(number=4, chosen=2, mlp_dim=32)
SPLIT = dict(number=8, chosen=4, mlp_dim=8, scale=4.0)  # two copies of four parts
SAME = "init: the first loss equals that of the dense model, except for rounding"
SHAPES = {"params/blocks/mlp/gate": [3, 16, 32]}
BATCH = tiny.packed_batch(0)


def make(model, devices=1, **more):
    cfg = tiny.config({"model": model} | more)
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:devices])


def nats(program, params):
    return np.asarray(jax.jit(program.model.token_losses)(params, tiny.on_mesh(program, BATCH)))


def save(folder, program):
    """(work folder, parameters) of a run of the program."""
    state = program.init()
    state = state._replace(params=jax.tree.map(lambda leaf: 1.5 * leaf, state.params))  # no new model has these
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    checkpoints.save(3, state, {"config": schema.to_dict(program.cfg)})
    checkpoints.close()
    return folder, state.params


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """(work folder, parameters on the host, nats_BT) of a dense run."""
    program = make(DENSE)
    folder, params = save(tmp_path_factory.mktemp("dense"), program)
    return folder, tiny.host(params), nats(program, params)


def upcycled(folder, how, program):
    """(the state of a mixture that begins with the dense run, lines)"""
    lines = []
    state = branch_state(program, InitConfig(from_path=str(folder), experts=how), lines.append)
    for leaf, planned in zip(jax.tree.leaves(state), jax.tree.leaves(program.abstract_state), strict=True):
        assert leaf.sharding == planned.sharding and leaf.dtype == planned.dtype and leaf.shape == planned.shape
    return state, lines


@pytest.mark.soak
def test_copies_compute_what_the_dense_model_did(dense):
    program = make(DENSE | dict(experts=COPY | dict(first_dense=1, shared_dim=8, bias=True)))
    state, lines = upcycled(dense[0], "copy", program)
    np.testing.assert_allclose(nats(program, state.params), dense[2], rtol=1e-6, atol=1e-6)  # sums in another order
    assert SAME in lines
    assert (
        "init: upcycled 4 experts per layer, mlp_dim 32: each is a copy of the dense MLP; routers are random" in lines
    )
    blocks, old = tiny.host(state.params["blocks"]), dense[1]["blocks"]
    assert not blocks["mlp"]["shared"]["down"].any() and blocks["mlp"]["shared"]["up"].any()
    np.testing.assert_array_equal(blocks["attention"]["wq"], old["attention"]["wq"][1:])
    np.testing.assert_array_equal(state.params["dense_blocks"]["mlp"]["up"], old["mlp"]["up"][:1])


@pytest.mark.soak
def test_so_do_the_parts_of_a_split_one_which_are_its_columns_under_one_router(dense):
    experts = SPLIT | dict(score="sigmoid", groups=2, groups_chosen=1)
    program = make(DENSE | dict(experts=experts), 8, mesh=dict(fsdp=2, tensor=2, expert=2))
    state, lines = upcycled(dense[0], "split", program)
    np.testing.assert_allclose(nats(program, state.params), dense[2], rtol=1e-6, atol=1e-6)
    assert SAME in lines
    fresh, got = tiny.host(program.init()), tiny.host(state)
    tiny.assert_same_bits(got.opt_state, fresh.opt_state)
    mlp, new, old = got.params["blocks"]["mlp"], fresh.params["blocks"]["mlp"], dense[1]["blocks"]["mlp"]
    for expert in range(8):
        columns = slice(expert % 4, None, 4)
        np.testing.assert_array_equal(mlp["gate"][:, expert], old["gate"][:, :, columns])
        np.testing.assert_array_equal(mlp["up"][:, expert], old["up"][:, :, columns])
        np.testing.assert_array_equal(mlp["down"][:, expert], old["down"][:, columns])
        np.testing.assert_array_equal(mlp["router"][:, :, expert], new["router"][:, :, expert // 4 * 4])
    assert "2 copies of the dense MLP, each split into 4 parts; routers are random" in "\n".join(lines)


@pytest.mark.soak
def test_layers_that_are_each_by_themselves_are_numbered_from_the_first_with_experts(tmp_path):
    unrolled = DENSE | dict(scan_layers=False, num_layers=2)
    folder, params = save(tmp_path, make(unrolled))
    old = tiny.host(params)["blocks"]
    state, _ = upcycled(folder, "copy", make(unrolled | dict(experts=COPY | dict(first_dense=1))))
    got = tiny.host(state.params)
    tiny.assert_same_bits(got["dense_blocks"]["0"], old["0"])
    tiny.assert_same_bits(got["blocks"]["0"]["attention"], old["1"]["attention"])
    for name, values in old["1"]["mlp"].items():
        np.testing.assert_array_equal(got["blocks"]["0"]["mlp"][name], np.stack([values] * 4))


@pytest.mark.parametrize(
    ("experts", "told"),
    [
        (SPLIT | dict(normalised=False), "model.experts.normalised=false the sum of a token's weights varies"),
        (SPLIT | dict(scale=1.0), "model.experts.scale=1 instead of 4"),
        (SPLIT | dict(chosen=3), "model.experts.chosen=3 splits a copy: not a multiple of its 4 parts"),
        (
            SPLIT | dict(groups=4, groups_chosen=2),
            "model.experts.groups=4 splits a copy: 2 experts per group are not a multiple of its 4 parts",
        ),
    ],
    ids=["normalised", "scale", "chosen", "groups"],
)
def test_what_promises_no_equal_loss_is_said_in_one_line(experts, told):
    model = tiny.config({"model": DENSE | dict(experts=experts)}).model
    lines = plan_upcycling("split", model, SHAPES, "runs/a").describe()
    assert len(lines) == 2 and lines[1].startswith(
        "init: WARNING: the first loss differs from that of the dense model: "
    )
    assert told in lines[1]


@pytest.mark.parametrize(
    ("how", "experts", "told"),
    [
        (
            "copy",
            COPY | dict(mlp_dim=16),
            ["model.experts.mlp_dim=16 must be 32, the MLP width of runs/a"],
        ),
        (
            "split",
            COPY | dict(mlp_dim=12),
            ["mlp_dim=12 must be a proper divisor of 32, the MLP width of runs/a", "use 16, 8 or 4, or"],
        ),
        ("split", COPY, ["mlp_dim=32 must be a proper divisor", "init.experts='copy' with mlp_dim=32"]),
        ("split", SPLIT | dict(number=6), ["model.experts.number=6 must be a multiple of 4, the number of parts"]),
    ],
)
def test_widths_and_numbers_that_do_not_fit_are_refused_by_name(how, experts, told):
    model = tiny.config({"model": DENSE | dict(experts=experts)}).model
    with pytest.raises(BadInput) as error:
        plan_upcycling(how, model, SHAPES, "runs/a")
    assert all(part in str(error.value) for part in told) and len(str(error.value).splitlines()) == 1


@pytest.mark.slow
def test_so_are_checkpoints_of_other_models(dense):
    refused = lambda how, model: str(pytest.raises(BadInput, upcycled, dense[0], how, make(model)).value)
    told = refused("none", DENSE | dict(experts=COPY))
    assert "mlp/down is float32[3,32,16] in the checkpoint, but float32[3,4,32,16] in this config" in told
    assert "(init.experts='copy' converts it to experts" in told
    told = refused("copy", DENSE | dict(experts=COPY, num_layers=2))
    assert "attention/wk is float32[3,16,2,8] in the checkpoint, but float32[2,16,2,8] in this config; " in told
    mixture = SHAPES | {"params/blocks/mlp/router": [3, 16, 4]}
    model = tiny.config({"model": DENSE | dict(experts=COPY)}).model
    for shapes, told in ((mixture, "runs/a already has experts; remove init.experts"), ({}, "which runs/a lacks")):
        with pytest.raises(BadInput, match=told):
            plan_upcycling("copy", model, shapes, "runs/a")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"init.what": "state"}, "experts='copy' cannot convert optimizer moments"),
        ({"model.experts": None}, "init.experts='copy' needs a model with experts; set model.experts"),
        (
            {"init.from_path": None},
            "experts requires a checkpoint with initial weights; set from_path",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_make_no_sense_beside_it_are_refused(settings, told):
    mixture = {"model.experts": COPY, "init.from_path": "runs/a", "init.experts": "copy"}
    with pytest.raises(BadInput, match=told):
        tiny.config(mixture | settings)


def test_nothing_is_sent_and_a_device_holds_its_part_of_the_dense_leaf_and_of_what_is_made():
    program = make(DENSE | dict(experts=SPLIT), 8, mesh=dict(fsdp=2, tensor=2, expert=2))
    name = "params/blocks/mlp/down"
    own, upcycling = named_leaves(program.abstract_state)[name], plan_upcycling("split", program.cfg.model, SHAPES, "")
    there = jax.sharding.NamedSharding(program.mesh, jax.sharding.PartitionSpec(None, "tensor", "fsdp"))
    dense = jax.ShapeDtypeStruct((3, 32, 16), "float32", sharding=there)
    compiled = upcycling.program(upcycling.origin(name), there, own).lower(dense).compile()
    assert not any(word in compiled.as_text() for word in ("all-", "permute", "reduce-scatter"))
    memory, made = compiled.memory_analysis(), 4 * 3 * 8 * 8 * 16 // 8
    assert memory.output_size_in_bytes == made and memory.argument_size_in_bytes == 4 * 3 * 32 * 16 // 4
    assert memory.temp_size_in_bytes <= 2 * made


@pytest.mark.slow
def test_a_dense_model_of_hugging_face_becomes_a_mixture_and_goes_out_as_one(tmp_path):
    hf = HF_LLAMA | dict(vocab_size=tiny.VOCAB)
    values = make_folder(tmp_path / "hf", hf, FLOAT32)
    assert convert.main([f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'dense'}"]) == 0
    _, cfg, _ = families.read(hf)
    own = dict(compute_dtype="float32", attention="xla", experts=dict(number=3, chosen=2, mlp_dim=cfg.mlp_dim))
    program = make(schema.to_dict(cfg) | own)
    state, lines = upcycled(tmp_path / "dense", "copy", program)
    assert SAME in lines
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig())
    ancestry = dataclasses.replace(open_source(str(tmp_path / "dense")), experts="copy").ancestry
    assert ancestry[0]["upcycled"] == "copy"
    checkpoints.save(0, state, {"config": schema.to_dict(program.cfg), "ancestry": ancestry})
    checkpoints.close()
    assert convert.main([f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}", "--dtype=float32"]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("mixtral", ["MixtralForCausalLM"])
    up = read_folder(tmp_path / "out")["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    np.testing.assert_array_equal(up, values["model.layers.1.mlp.up_proj.weight"])
