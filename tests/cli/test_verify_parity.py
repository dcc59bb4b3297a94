"""How the work is divided does not change the numbers; and the proof sees it where that is not so."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale import schema
from jaxscale.cli import verify_parity as vp
from jaxscale.cli.verify_parity import ParallelLayout, expert_layouts, tensor_layout
from jaxscale.config import RunConfig
from jaxscale.core.config import PipelineConfig
from jaxscale.system.attempt import COLLECTIVE_TIMEOUT, simulated_devices_env
from jaxscale.tools.qualify.timing import CompileLog

SIZES = dict(vocab_size=263, num_layers=2, embed_dim=32)  # 263 is prime
LLAMA = SIZES | dict(name="llama", num_heads=8, num_kv_heads=4, head_dim=8, mlp_dim=64)
GPT2 = SIZES | dict(name="gpt2", num_heads=4, max_seq_len=16, dropout=0.1)
ONE = ParallelLayout({}, "zero3", 1)
TEXT = pathlib.Path(__file__).parents[2] / "LICENSE"  # does not change as the program does


def config(model, **values):
    data = dict(name="files", files=str(TEXT))
    base = dict(seq_len=16, batch_tokens=64, train_tokens=10**6, data=data, model=model, mesh=dict(tensor=2))
    return vp.settings(schema.from_dict(RunConfig, base | values))


FEW = [ParallelLayout({"fsdp": 4, "tensor": 2}, "zero3", 2)]
MORE = [
    ParallelLayout({"fsdp": 8}, "zero1", 1),
    ParallelLayout({}, "zero3", 4),
    ParallelLayout({"data": 8}, "zero3", 1),
    ParallelLayout({"fsdp": 8}, "zero2", 4),
    ParallelLayout({"fsdp": 8}, "zero3", 1),
    ParallelLayout({"data": 2, "tensor": 4}, "zero3", 1),
]
GPT2_LAYOUTS = [
    ParallelLayout({"data": 8}, "zero3", 2),
    ParallelLayout({"fsdp": 4, "tensor": 2}, "zero3", 1),
    ParallelLayout({"tensor": 8}, "zero3", 1),
]
SHARED = [
    ParallelLayout({"context": 8}, "zero3", 1, "ring"),
    ParallelLayout({"context": 4, "tensor": 2}, "zero3", 2, "gather"),
    ParallelLayout({"fsdp": 2, "context": 2, "tensor": 2}, "zero3", 1, "ulysses"),
    ParallelLayout({"data": 2, "context": 4}, "zero1", 4, "gather"),
]
STAGED = [
    ParallelLayout({"pipeline": 2}, "zero3", 4, stages=PipelineConfig(schedule="gpipe", head="whole")),
    ParallelLayout({"pipeline": 2, "fsdp": 4}, "zero1", 4),
    ParallelLayout({"pipeline": 2, "context": 2, "tensor": 2}, "zero3", 4),
]
MIXTURE = LLAMA | dict(experts=dict(number=8, chosen=2, mlp_dim=16, bias=True), remat="full")
EXPERTS = [layout for layout in expert_layouts() if len(layout.mesh) > 1 and layout.num_microbatches == 1]
PROOFS = [
    pytest.param(LLAMA, FEW, id="llama"),
    pytest.param(LLAMA, MORE, id="llama, more", marks=pytest.mark.soak),
    pytest.param(LLAMA, SHARED, id="llama, shared rows", marks=pytest.mark.soak),
    pytest.param(LLAMA, STAGED, id="llama, stages", marks=pytest.mark.soak),
    pytest.param(
        MIXTURE,
        [ParallelLayout({"expert": 2, "fsdp": 2}, "zero3", 2, exchange="send")],
        id="a mixture",
        marks=pytest.mark.soak,
    ),
    pytest.param(MIXTURE, EXPERTS, id="a mixture, more", marks=pytest.mark.soak),
    pytest.param(GPT2, GPT2_LAYOUTS, id="gpt2", marks=pytest.mark.soak),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layouts"), PROOFS)
def test_losses_and_gradients_do_not_depend_on_the_layout(model, layouts):
    told = []
    found = vp.verify(config(model), [ONE, *layouts], told.append)
    assert found.passes, "\n".join(told)
    first, last = found.reference.losses[[0, -1]]
    assert last < 0.98 * first  # the steps did something
    possible = [row for row in found.rows if not row.unsupported]
    assert len(possible) == len(found.rows) - (model is GPT2)  # 4 heads on 8 devices
    assert "parity: all layouts agree" in found.lines()[-1]


@pytest.mark.slow
def test_the_gradient_that_is_compared_is_the_one_that_moves_the_parameters():
    cfg = config(LLAMA, optim=dict(weight_decay=0.0))
    program, batches = vp.program(cfg, ONE), vp.read_batches(cfg)
    before = jax.tree.map(np.asarray, program.init().params)
    trace = vp.run(program, batches[:2])
    state, metrics = program.train_step(program.init(), jax.tree.map(jnp.asarray, batches[0]))
    state, _ = program.train_step(state, jax.tree.map(jnp.asarray, batches[1]))
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in trace.gradients[0]))
    np.testing.assert_allclose(norm, metrics["grad_norm"], rtol=1e-6)
    for start, end, one, two in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), *trace.gradients):
        np.testing.assert_allclose(end, start - vp.LR * (one + two), atol=1e-6)  # rounding of parameters near 1


def made_trace(seed):
    rng = np.random.default_rng(seed)
    return vp.LayoutRun(rng.uniform(3, 5, 5), [[rng.normal(size=(4, 3)), rng.normal(size=7)] for _ in range(5)], 1, [])


def test_other_numbers_do_not_agree():
    row = vp.compare(made_trace(0), made_trace(1), ONE)
    assert not row.agrees and row.loss > 1e-3 and row.gradient > 0.1 and "DIFFERS" in row.line()
    assert not vp.Parity(made_trace(0), [row]).passes


@pytest.mark.parametrize(
    "changed",
    [
        lambda trace: dict(losses=trace.losses * (1 + 2e-5 * np.eye(5)[4])),
        lambda trace: dict(losses=np.full(5, np.nan)),
        lambda trace: dict(gradients=[*trace.gradients[:4], [leaf * (1 + 2e-5) for leaf in trace.gradients[4]]]),
        lambda trace: dict(compilations=2),
        lambda trace: dict(warnings=["W0000 Involuntary full rematerialization."]),
    ],
    ids=["loss", "nan", "gradient", "compiled twice", "rematerialization"],
)
def test_a_small_difference_of_any_kind_is_seen(changed):
    same = made_trace(0)
    assert vp.compare(same, same, ONE).agrees
    assert not vp.compare(same, dataclasses.replace(same, **changed(same)), ONE).agrees


def test_a_second_compilation_is_counted():
    f = jax.jit(lambda x: x * 3.0 - 1.0)
    with CompileLog() as found:
        for size in (3, 3, 4):
            f(np.ones(size, np.float32))
    assert found.count == 2
    jax.jit(lambda x: x * 5.0)(np.ones(3, np.float32))
    assert found.count == 2


def test_xlas_warning_of_a_full_rematerialization_is_caught():
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    place = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    cut = lambda x: jnp.sin(x).reshape(4, 8, 32)
    f = jax.jit(cut, in_shardings=place(None, ("b", "a")), out_shardings=place("b", "c"))
    with vp.captured_stderr() as written:
        f.lower(jax.ShapeDtypeStruct((32, 32), jnp.float32)).compile()
        print("from python", file=sys.stderr)
    assert vp.REMATERIALIZED in written[0]


@pytest.mark.slow
def test_what_xla_says_before_it_ends_the_process_is_seen():
    module = "import os, jaxscale.cli.verify_parity as vp"
    code = f"{module}\nwith vp.captured_stderr():\n os.write(2, b'why')\n os.abort()"
    assert "why" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr


def test_an_environment_of_simulated_devices_has_nothing_to_change(monkeypatch):
    """Else a process would replace itself for ever."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=b")
    wanted = simulated_devices_env(16)
    assert COLLECTIVE_TIMEOUT in wanted["XLA_FLAGS"] and "--xla_a=b" in wanted["XLA_FLAGS"]
    monkeypatch.setattr(os, "environ", wanted)
    assert simulated_devices_env(16) == wanted


def test_the_configs_own_layout_is_among_those_proved():
    cfg = config(LLAMA | dict(num_kv_heads=2), rules="zero1")
    wanted = vp.layouts(cfg)
    assert len(set(map(str, wanted))) >= 8 and wanted[0] == ONE
    assert ParallelLayout({"fsdp": 4, "tensor": 2}, "zero1", 1) in wanted
    assert tensor_layout(2, 1) in wanted and tensor_layout(4, 1) not in wanted  # two kv heads
    assert cfg.model.vocab_size == 264
    ways = [layout.sharing for layout in wanted if layout.mesh == {"context": 4, "tensor": 2}]
    assert ways == ["gather", "ring"]  # two kv heads, of which a device has one


@pytest.mark.soak
def test_the_proof_starts_itself_again_where_there_are_no_16_devices():
    code = """if True:
        import sys
        from jaxscale.cli import verify_parity
        verify_parity.on_simulated_devices([sys.executable, *sys.orig_argv[1:]])
        import jax
        print(jax.device_count(), jax.config.jax_enable_compilation_cache)
    """
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "16 False\n", done.stderr
