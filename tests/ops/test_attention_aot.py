"""Attention kernels are compiled by the compilers of the machines they are made for, with none of these at hand."""

import collections
import importlib.util
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxscale.build import make_program
from jaxscale.core.axes.context_axis import make_context_axis
from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.plan import context_parallel_attend, single_device_plan
from jaxscale.core.shardings import RULES, partition_spec
from jaxscale.kernels.attention import cudnn, resolve_attention, splash
from jaxscale.kernels.config import AttentionNeeds, Choice
from jaxscale.kernels.rope import make_rotation
from jaxscale.program.budget import resolve_budget
from jaxscale.tools.planning.links import make_torus
from jaxscale.tools.planning.topology import link_domains, open_topology
from jaxscale.tools.preflight.hlo import read_hlo
from jaxscale.tools.preflight.hlo_text import parse_module, parse_shapes
from jaxscale.tools.preflight.roofline import roofline
from jaxscale.tools.preflight.step_report import collective_rows

pytestmark = pytest.mark.aot
COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
RULE_TABLE = RULES["zero3"].params


@pytest.fixture(scope="module")
def devices_of():
    """devices_of(topology), or the test is skipped with what is missing."""

    def open_one(name):
        plugin = "libtpu" if name.startswith("v") else "jax_cuda12_plugin"
        if importlib.util.find_spec(plugin) is None:
            pytest.skip(f"{name} needs {plugin}, which is not installed")
        return open_topology(name).devices

    return open_one


def compile_attention(devices, mesh, needs, seq_len=256):
    """(text of the compiled value and gradients, the name of what was chosen): 8 rows, 4 heads, 2 key-value heads."""
    mesh = make_mesh(MeshConfig(**mesh), devices)
    platform = devices[0].platform
    attend, choice = resolve_attention("auto", platform, needs, mesh.devices.flat[0])
    rows_spec = partition_spec(("act_batch", "act_seq"), RULE_TABLE)
    heads_spec = partition_spec(("act_batch", "act_seq", "heads", "head_dim"), RULE_TABLE)
    make = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    heads = lambda num, size=needs.v_dim: make((8, seq_len, num, size), needs.dtype, heads_spec)
    ids = make((8, seq_len), jnp.int32, rows_spec)

    def own(q, k, v, ids, dout):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, ids), q, k, v)
        return out, *pull(dout)

    in_specs = (heads_spec, heads_spec, heads_spec, rows_spec, heads_spec)
    run = jax.shard_map(own, mesh=mesh, in_specs=in_specs, out_specs=(heads_spec,) * 4, check_vma=False)
    return jax.jit(run).lower(
        heads(4, needs.head_dim), heads(2, needs.head_dim), heads(2), ids, heads(4)
    ).compile().as_text(), choice.name


def custom_calls(text):
    """Kernel to the number of its calls in a program's text."""
    return collections.Counter(re.findall(r'custom_call_target="((?:tpu_custom_call|__cudnn)[^"]*)"', text))


@pytest.mark.parametrize("mesh", [dict(fsdp=8), dict(fsdp=4, tensor=2)], ids=str)
def test_splash_attention_compiles_on_a_mesh_of_tpus_and_moves_nothing(mesh, devices_of):
    needs = AttentionNeeds(head_dim=128, dtype="bfloat16", window=200, softcap=30.0)
    text, chosen = compile_attention(devices_of("v5e:2x4"), mesh, needs)
    assert chosen == "splash" and custom_calls(text) == {"tpu_custom_call": 3}  # forward, and two backward
    assert not re.findall(COLLECTIVES, text)


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    "head_dim, dtype, softcap, value_dim",
    [(256, "bfloat16", 50.0, None), (80, "float32", None, None), (192, "bfloat16", None, 128)],  # the last: DeepSeek's
)
def test_splash_attention_compiles_for_any_head_dim_with_a_chips_own_blocks(
    head_dim, dtype, softcap, value_dim, topology, devices_of
):
    needs = AttentionNeeds(head_dim=head_dim, dtype=dtype, softcap=softcap, value_dim=value_dim)
    devices = devices_of(topology)
    assert splash.blocks_for(devices[0].device_kind) != splash.DEFAULT_BLOCKS
    text, chosen = compile_attention(devices, dict(fsdp=4), needs, seq_len=4096)
    assert chosen == "splash" and custom_calls(text) == {"tpu_custom_call": 3}


def step_text(devices, **overrides):
    """The compiled training step of a small model whose heads are as wide as real ones."""
    wide = {"seq_len": 256, "batch_tokens": 8 * 256, "model.embed_dim": 64, "model.head_dim": 128}
    wide |= {"model.compute_dtype": "bfloat16", "model.attention": "auto"}
    cfg = tiny.config(wide | {name.replace("__", "."): value for name, value in overrides.items()})
    program = make_program(cfg, resolve_budget(cfg, None), devices)
    return program.train_step.lower(program.abstract_state, program.abstract_batch).compile().as_text()


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:1x8"])
def test_a_step_that_keeps_attentions_result_runs_its_kernel_once_a_layer(topology, devices_of):
    devices = devices_of(topology)
    mesh = dict(mesh__fsdp=4, mesh__tensor=2)
    kept, again = (
        sum(custom_calls(step_text(devices, model__remat=remat, **mesh)).values()) for remat in ("attention", "full")
    )
    # The scanned layers hold each kernel once; with full remat the backward loop holds the forward kernel again.
    assert 0 < kept < again


def compile_shared(devices, form, seq_len, window=None):
    """(compiled value and gradients of a row that all devices share, the mesh): 8 heads, 2 key-value heads."""
    mesh = make_mesh(MeshConfig(fsdp=1, context=len(devices)), devices)
    needs, context = AttentionNeeds(head_dim=128, dtype="bfloat16", window=window), make_context_axis(mesh)
    plan = single_device_plan("tpu", "auto", needs, devices[0])
    exchange = Choice(form, form)
    attend = context_parallel_attend(plan.attend, plan.attention.name, exchange, needs, context, devices[0])
    spec = PartitionSpec(None, "context")
    make = lambda *more, dtype="bfloat16": jax.ShapeDtypeStruct(
        (1, seq_len, *more), dtype, sharding=NamedSharding(mesh, spec)
    )

    def own(q, k, v, ids, dout):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, ids), q, k, v)
        return out, *pull(dout)

    arguments = make(8, 128), make(2, 128), make(2, 128), make(dtype="int32"), make(8, 128)
    run = jax.shard_map(own, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(run).lower(*arguments).compile(), mesh


@pytest.mark.parametrize("window", [None, 1500], ids=["keys gathered", "neighbours' keys"])
def test_shared_rows_compile_with_as_many_blocks_on_each_chip(window, devices_of):
    text = compile_shared(devices_of("v5p:2x2x2"), "gather", 32_768, window)[0].as_text()
    assert custom_calls(text)["tpu_custom_call"] == 3
    gathers = len(re.findall(r" all-gather(?:-start)?\(", text))
    if window is None:  # chunks of 2,048 positions: zigzag sees 260 of 512 blocks, whichever chip it is
        assert set(re.findall(r"visits_\d+_\d+_\d+", text)) == {"visits_260_260_260"} and gathers
    else:
        assert not gathers and re.search(r" collective-permute(?:-start)?\(", text)


def test_a_ring_visits_the_same_blocks_while_keys_go_round_and_its_memory_does_not_grow(devices_of):
    kernel_flops, memory = {}, {}
    for form in ("gather", "ring"):
        for topology, seq_len in (("v5p:2x2x1", 16_384), ("v5p:2x2x2", 32_768)):
            done, mesh = compile_shared(devices_of(topology), form, seq_len)
            devices, chip = list(mesh.devices.flat), open_topology(topology).chip
            torus = make_torus(devices, chip)
            facts = read_hlo(done.as_text(), dict(mesh.shape), link_domains(devices), torus)
            kernel_flops[form, len(devices)] = facts.kernel_flops
            memory[form, len(devices)] = done.memory_analysis().temp_size_in_bytes
    rows = collective_rows(facts, roofline(facts, chip, 0.0).played)  # of the last
    assert {row.kind for row in rows} == {"collective-permute"} and not any(row.is_blocking for row in rows)
    assert kernel_flops["ring", 8] == kernel_flops["gather", 8] > 0
    assert memory["ring", 8] < 1.02 * memory["ring", 4] and memory["gather", 8] > 1.1 * memory["gather", 4]


def test_heads_are_rotated_whole_in_bfloat16_and_in_the_order_of_the_kernel(devices_of):
    device = devices_of("v6e:2x2")[0]
    plan = single_device_plan("tpu", "auto", AttentionNeeds(head_dim=128, dtype="bfloat16"), device)

    def heads(x_BTD, w_DNH, positions_BT):
        q_BTNH = plan.project("BTD,DNH->BTNH", x_BTD, w_DNH)
        return plan.rotate(q_BTNH, make_rotation(positions_BT, 128, 10_000.0)).swapaxes(1, 2)

    place = SingleDeviceSharding(device)
    make = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    args = make((4, 512, 512), "bfloat16"), make((512, 16, 128), "bfloat16"), make((4, 512), "int32")
    module = parse_module(jax.jit(heads).lower(*args).compile().as_text())
    written = [
        (instruction.opcode, shape.dtype)
        for instruction in module.computations[module.entry].instructions.values()
        for shape in parse_shapes(instruction.type_text)
        if math.prod(shape.dims) >= 4 * 512 * 16 * 64
    ]
    assert written == [("fusion", "bf16")] * 2  # the product, and the rotation


@pytest.mark.parametrize("mesh", [dict(fsdp=8), dict(fsdp=4, tensor=2)], ids=str)
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("card", ["h100", "a100"])
def test_cudnn_attention_compiles_on_a_mesh_of_gpus_and_moves_nothing(card, mesh, window, devices_of):
    needs = AttentionNeeds(head_dim=128, dtype="bfloat16", window=window)
    text, chosen = compile_attention(devices_of(f"{card}:1x8"), mesh, needs, seq_len=255)
    packed = card == "h100"
    calls = {"__cudnn$fmhaSoftmax": 3, "__cudnn$fmhaSoftmaxBackward": 2}  # once, and in rounds that few rows need
    with_bias = {"__cudnn$fmhaScaleBiasSoftmax": 1, "__cudnn$fmhaScaleBiasSoftmaxBackward": 1}
    assert chosen == "cudnn" and custom_calls(text) == (calls if packed else with_bias)
    assert not re.findall(COLLECTIVES, text)
    assert bool(re.findall(r"\[(?:\d+,)*25[56],25[56]\]", text)) != packed  # no array of positions by positions


def test_packed_attention_is_the_call_that_jax_makes(devices_of):
    """Of equal numbers of heads, where JAX's own places are right; its own tests run it on GPUs."""
    from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn  # its checks want a card, its primitives do not

    place = SingleDeviceSharding(devices_of("h100:1x8")[0])
    make = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    x, statistics = make((2, 64, 4, 128), jnp.bfloat16), make((2 * 16, 4, 64), jnp.float32)
    spans = cudnn.DocumentSpans(make((2, 16), jnp.int32), make((2, 17), jnp.int32))
    how = dict(scale=128**-0.5, seed=42, dropout_rate=0.0, variadic_args=(False, False), layout=0)
    how |= dict(mask_type=jax_cudnn.MaskType.PADDING_CAUSAL, sliding_window_length=9)
    none = lambda: (jnp.zeros(0, jnp.bfloat16),)
    ours = cudnn.cudnn_kernel(window=9)

    def theirs_forward(q, k, v, spans):
        places = (spans.lengths_BC, spans.lengths_BC, spans.begins_BC, spans.begins_BC)
        bind = jax_cudnn._dot_product_attention_fwd_p_wrapper.bind
        return bind(q, k, v, *none(), *places, *none(), *none(), is_training=True, **how)

    def theirs_backward(q, k, v, spans, out, statistics, dout):
        places = (spans.lengths_BC, spans.lengths_BC, spans.begins_BC, spans.begins_BC)
        bind = jax_cudnn._dot_product_attention_bwd_p_wrapper.bind
        return bind(q, k, v, *none(), *places, *none(), *none(), statistics, out, dout, **how)

    for mine, theirs, more in (
        (ours.forward, theirs_forward, ()),
        (ours.backward, theirs_backward, (x, statistics, x)),
    ):
        found, right = (cudnn_call(jax.jit(f).lower(x, x, x, spans, *more).compile()) for f in (mine, theirs))
        assert found == right


def cudnn_call(compiled):
    """(types of results and operands, target, settings) of a program's one call of cuDNN."""
    (line,) = [line for line in compiled.as_text().splitlines() if "__cudnn$" in line]
    types, operands = re.search(r"= (\(.*?\)) custom-call\(", line)[1], re.search(r"constraints={(.*?)}, api", line)[1]
    settings = json.loads(line[line.index("backend_config=") + len("backend_config=") :])["cudnn_fmha_backend_config"]
    scores = settings["intermediate_tensor_shape"]
    kept = {name: scores[name] for name in ("element_type", "dimensions")} | {
        "order": scores["layout"]["minor_to_major"]
    }
    return types, operands, re.search(r'target="([^"]*)"', line)[1], settings | {"intermediate_tensor_shape": kept}


def test_what_cudnn_keeps_is_not_a_mask_for_each_layer(devices_of):
    needs = AttentionNeeds(head_dim=128, dtype="bfloat16")
    attend, _ = resolve_attention("cudnn", "gpu", needs)
    devices_of("h100:8")  # cuDNN's version is asked for while tracing
    x = jnp.ones((1, 64, 2, 128), jnp.bfloat16)
    ids = np.ones((1, 64), np.int32)

    def layers(x):
        return jax.lax.scan(lambda x, _: (attend(x, x, x, ids), None), x, None, length=3)[0]

    trace = str(jax.make_jaxpr(jax.grad(lambda x: layers(x).astype(jnp.float32).sum()))(x))
    assert "[1,1,64,64]" in trace and "[3,1,1,64,64]" not in trace


def test_rows_in_parts_leave_room_for_one_part_of_the_activations(devices_of):
    wide = {"model.mlp_dim": 4096, "model.num_layers": 2, "seq_len": 1024, "batch_tokens": 16 * 1024}

    def peak(parts):
        cfg = tiny.config(wide | {"model.remat": "full", "model.row_parts": parts, "model.compute_dtype": "bfloat16"})
        program = make_program(cfg, resolve_budget(cfg, None), devices_of("v5e:1x1"))
        lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
        return lowered.compile().memory_analysis().peak_memory_in_bytes

    assert peak(4) < 0.6 * peak(1)
