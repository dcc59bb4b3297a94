"""Attention kernels are compiled by the compilers of the machines they are made for, with none of these at hand."""

import collections
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding

from jaxscale.build import make_program
from jaxscale.config import resolve_budget
from jaxscale.ops.attention import choose_attention, splash
from jaxscale.ops.config import AttentionNeeds
from jaxscale.planning.topology import open_topology
from jaxscale.sharding.config import MeshConfig
from jaxscale.sharding.mesh import make_mesh
from jaxscale.sharding.rules import RULES, partition_spec

pytestmark = pytest.mark.aot
COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
RULE_TABLE = RULES["zero3"].params


@pytest.fixture(scope="module")
def devices_of():
    """devices_of(topology), or the test is skipped with what is missing."""

    def open_one(name):
        plugin = "libtpu" if name.startswith("v") else "jax_cuda12_plugin"
        if importlib.util.find_spec(plugin) is None:
            pytest.skip(f"{name} is compiled for by {plugin}, which is not installed")
        return open_topology(name).devices

    return open_one


def compile_attention(devices, mesh, needs, seq_len=256):
    """(text of the compiled value and gradients, the name of what was chosen): 8 rows, 4 heads, 2 key-value heads."""
    mesh = make_mesh(MeshConfig(**mesh), devices)
    platform = devices[0].platform
    attend, chosen, _ = choose_attention("auto", platform, needs, mesh.devices.flat[0])
    rows_spec = partition_spec(("act_batch", "act_seq"), RULE_TABLE)
    heads_spec = partition_spec(("act_batch", "act_seq", "heads", "head_dim"), RULE_TABLE)
    make = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    heads = lambda num: make((8, seq_len, num, needs.head_dim), needs.dtype, heads_spec)
    ids = make((8, seq_len), jnp.int32, rows_spec)

    def own(q, k, v, ids, dout):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, ids), q, k, v)
        return out, *pull(dout)

    in_specs = (heads_spec, heads_spec, heads_spec, rows_spec, heads_spec)
    run = jax.shard_map(own, mesh=mesh, in_specs=in_specs, out_specs=(heads_spec,) * 4, check_vma=False)
    return jax.jit(run).lower(heads(4), heads(2), heads(2), ids, heads(4)).compile().as_text(), chosen


def custom_calls(text):
    """Kernel to the number of its calls in a program's text."""
    return collections.Counter(re.findall(r'custom_call_target="((?:tpu_custom_call|__cudnn)[^"]*)"', text))


@pytest.mark.parametrize("mesh", [dict(fsdp=8), dict(fsdp=4, tensor=2)], ids=str)
def test_splash_attention_compiles_on_a_mesh_of_tpus_and_moves_nothing(mesh, devices_of):
    needs = AttentionNeeds(head_dim=128, dtype="bfloat16", window=200, softcap=30.0)
    text, chosen = compile_attention(devices_of("v5e:2x4"), mesh, needs)
    assert chosen == "splash" and custom_calls(text) == {"tpu_custom_call": 3}  # forward, and two backward
    assert not re.findall(COLLECTIVES, text)


@pytest.mark.parametrize("head_dim, dtype", [(256, "bfloat16"), (80, "float32")])
def test_splash_attention_compiles_for_any_head_dim_with_the_largest_blocks_of_v6e(head_dim, dtype, devices_of):
    needs = AttentionNeeds(head_dim=head_dim, dtype=dtype)
    devices = devices_of("v6e:2x2")
    assert splash.blocks_for(devices[0].device_kind) != splash.ANY_CHIP
    text, chosen = compile_attention(devices, dict(fsdp=4), needs, seq_len=2048)
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


@pytest.mark.parametrize("mesh", [dict(fsdp=8), dict(fsdp=4, tensor=2)], ids=str)
@pytest.mark.parametrize("window", [None, 200])
def test_cudnn_attention_compiles_on_a_mesh_of_gpus_and_moves_nothing(mesh, window, devices_of):
    needs = AttentionNeeds(head_dim=128, dtype="bfloat16", window=window)
    text, chosen = compile_attention(devices_of("h100:1x8"), mesh, needs, seq_len=255)
    assert chosen == "cudnn" and sum(custom_calls(text).values()) == 2
    assert not re.findall(COLLECTIVES, text)


def test_what_cudnn_keeps_is_not_a_mask_for_each_layer(devices_of):
    needs = AttentionNeeds(head_dim=128, dtype="bfloat16")
    attend, _, _ = choose_attention("cudnn", "gpu", needs)
    devices_of("h100:8")  # cuDNN's version is asked for while tracing
    x = jnp.ones((1, 64, 2, 128), jnp.bfloat16)
    ids = np.ones((1, 64), np.int32)

    def layers(x):
        return jax.lax.scan(lambda x, _: (attend(x, x, x, ids), None), x, None, length=3)[0]

    trace = str(jax.make_jaxpr(jax.grad(lambda x: layers(x).astype(jnp.float32).sum()))(x))
    assert "[1,1,64,64]" in trace and "[3,1,1,64,64]" not in trace
