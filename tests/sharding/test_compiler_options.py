"""Options for XLA: the table's rows, what the user has set, what a program is compiled with, and what each row does."""

import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxscale.build import parallel_settings
from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.plan import resolve_plan
from jaxscale.kernels.compiler_options import (
    OFFLOAD_TORUS,
    ON_BY_DEFAULT,
    OVERLAP,
    PIPELINE,
    PIPELINED_GATHER,
    SLICE_FUSION,
    TABLE,
    check_options,
    compiler_options,
)
from jaxscale.tools.planning.placeholder_devices import open_machine
from jaxscale.tools.planning.topology import open_topology

GPU = [row for row in TABLE if row.devices == ("gpu",)]
SCHEDULER, (GATHER, AHEAD) = "xla_gpu_enable_latency_hiding_scheduler", PIPELINED_GATHER
APART = "xla_gpu_reduce_scatter_combine_threshold_bytes"
USUAL = {row.name: row.value for row in GPU if row.name not in (OVERLAP, SLICE_FUSION)}


def test_a_platform_gets_its_own_rows():
    assert compiler_options("gpu", "any", {}, {}).values == {SCHEDULER: True, GATHER: AHEAD, APART: 1}
    assert compiler_options("cpu", "cpu", {}, {}).values == compiler_options("tpu", "TPU v4", {}, {}).values == {}
    assert compiler_options("tpu", "TPU v5", {}, {}).offloads_torus


@pytest.mark.parametrize("extra", [{OFFLOAD_TORUS[0]: False}, {}], ids=["config", "environment"])
def test_without_one_of_the_rows_for_the_torus_collectives_are_taken_in_stages(extra):
    environment = {} if extra else {"LIBTPU_INIT_ARGS": f"--{OFFLOAD_TORUS[0]}=false"}
    assert not compiler_options("tpu", "TPU v5", extra, environment).offloads_torus


def test_a_loop_whose_layers_take_one_of_two_ways_fetches_nothing_ahead():
    usual, branching = (compiler_options("tpu", "TPU v5", {}, {}, prefetch_weights=ahead) for ahead in (True, False))
    assert set(usual.values) - set(branching.values) == set(PIPELINE)
    assert (
        compiler_options("tpu", "TPU v5", {PIPELINE[0]: True}, {}, prefetch_weights=False).values[PIPELINE[0]] is True
    )


def test_weights_that_come_over_the_network_have_more_under_way_at_a_time():
    assert compiler_options("gpu", "any", {}, {}, over_network=True).values == USUAL | {OVERLAP: 16}


def options_of(cfg, machine, **mesh):
    """The compiler options of the plan of a config without stages."""
    settings = parallel_settings(cfg)._replace(pipeline=None)
    return resolve_plan(
        cfg.model, make_mesh(MeshConfig(**mesh), open_machine(machine).devices), settings
    ).compiler_options


@pytest.mark.parametrize(
    ("machine", "mesh", "network"),
    [
        ("h100:2x8", {}, True),
        ("h100:1x8", {}, False),
        ("h100:2x8", {"data": 2}, False),
        ("h100:2x8", {"tensor": 8}, True),
        ("h100:4x8", {"pipeline": 2}, False),
        ("v5p:2x2x2", {}, False),
    ],
)
def test_weights_come_over_the_network_where_fsdp_crosses_between_nodes(machine, mesh, network):
    options = options_of(tiny.config({}), machine, **mesh)
    assert (OVERLAP in options.values) == network


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ({"remat": "minimal"}, True),
        ({"remat": "minimal", "remat_offload": ("mlp_gate", "mlp_up")}, False),
        ({"remat": "qkv"}, False),
        ({"remat": "minimal", "compute_dtype": "float32"}, False),
        ({"remat": "none"}, True),
        ({"remat": "dots"}, True),
        ({"remat": "save", "remat_save": ("mlp_gate",)}, True),
        ({"remat": "save", "remat_save": ("attention_out",)}, False),
        ({"remat": "full"}, False),
        ({"remat": "none", "experts": None}, False),
    ],
)
def test_kernels_of_experts_run_once_also_where_a_loop_keeps_what_they_give(model, kept):
    model = {"experts": dict(number=4, chosen=2, mlp_dim=16), "compute_dtype": "bfloat16"} | model
    cfg = tiny.config({f"model.{name}": value for name, value in model.items()})
    assert SLICE_FUSION not in options_of(cfg, "a100:1x1").values
    options = options_of(cfg, "h100:1x1")
    assert options.values.get(SLICE_FUSION) == (False if kept else None)


def test_every_row_says_what_it_does_and_what_was_seen():
    assert TABLE and all(row.effect and row.evidence for row in TABLE)
    assert len({(row.devices, row.name) for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
@pytest.mark.parametrize("value", ["", "=true", "=false"])
def test_what_the_environment_sets_is_left_to_it_and_told(variable, value):
    options = compiler_options("gpu", "any", {}, {variable: f"--xla_a=1 --{SCHEDULER}{value}  --xla_b"})
    assert options.values == {GATHER: AHEAD, APART: 1} and options.set_by_environment == (SCHEDULER,)
    told = f"{GATHER}={AHEAD}, {APART}=1; {SCHEDULER} from XLA_FLAGS or LIBTPU_INIT_ARGS"
    assert str(options) == told


def test_what_is_set_by_its_former_name_is_left_to_it():
    former = "xla_gpu_enable_pipelined_all_gather"
    options = compiler_options("gpu", "any", {}, {"XLA_FLAGS": f"--{former}=false"})
    assert GATHER not in options.values and options.set_by_environment == (former,)


def test_a_name_that_only_begins_alike_is_no_such_option():
    assert compiler_options("gpu", "any", {}, {"XLA_FLAGS": f"--{SCHEDULER}_x=1"}).set_by_environment == ()


def test_the_config_goes_over_the_table_and_the_environment():
    options = compiler_options("gpu", "any", {SCHEDULER: False, "xla_c": 3}, {"XLA_FLAGS": f"--{SCHEDULER}=true"})
    assert options.values == USUAL | {SCHEDULER: False, "xla_c": 3} and options.set_by_environment == ()


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (
            {"xla_no_such_thing": True},
            "XLA for cpu rejects compiler.xla_no_such_thing=True: No such compile option",
        ),
        (
            {"xla_cpu_enable_fast_math": "perhaps"},
            "XLA for cpu rejects compiler.xla_cpu_enable_fast_math=perhaps",
        ),
    ],
)
def test_an_option_that_xla_does_not_know_is_one_line_before_anything_is_compiled(extra, told):
    check_options({"xla_cpu_enable_fast_math": False}, jax.devices()[0])
    with pytest.raises(ValueError) as error:
        tiny.program({f"compiler.{name}": value for name, value in extra.items()})
    assert str(error.value).startswith(told) and "\n" not in str(error.value)


@pytest.mark.slow
def test_the_step_is_compiled_with_the_options_of_the_config(tmp_path):
    program = tiny.program({"compiler.xla_dump_to": str(tmp_path), "model.num_layers": 1})
    program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    assert any("train_step" in path.name for path in tmp_path.iterdir())


def loop_over_layers(mesh):
    """A lowered gradient step over layers whose parameters are shared along fsdp: small, with all that a row moves."""
    place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
    up, down, rows = place(None, "fsdp", "tensor"), place(None, "tensor", "fsdp"), place(("data", "fsdp"), None)
    D, F, L = 512, 1024, 4

    def loss(params, x_BD):
        def layer(h_BD, layer_params):
            w_DF, w_FD = [w.astype(jnp.bfloat16) for w in layer_params]
            y_BD = jax.lax.with_sharding_constraint(jax.nn.relu(h_BD @ w_DF) @ w_FD, rows)
            return h_BD + y_BD, None

        h_BD, _ = jax.lax.scan(jax.checkpoint(layer), x_BD, params)
        return jnp.sum(jnp.square(h_BD.astype(jnp.float32)))

    def step(params, x_BD):
        grads = jax.lax.with_sharding_constraint(jax.grad(loss)(params, x_BD), [up, down])
        return jax.tree.map(lambda w, g: w - 1e-3 * g, params, grads)

    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((L, D, F), (L, F, D))]
    batch = jax.ShapeDtypeStruct((1024 * mesh.size, D), jnp.bfloat16)
    jitted = jax.jit(step, in_shardings=([up, down], rows), out_shardings=[up, down], donate_argnums=0)
    return jitted.lower(params, batch)


def program_text(lowered, options):
    """The compiled program in its order, without what tells nothing of it: names' numbers, source lines, its header."""
    text = lowered.compile(compiler_options=options).as_text()
    return re.sub(r"metadata=\{[^}]*\}|HloModule [^\n]*|\.\d+", "", text)


def lowered_for(topology):
    package = "jax_cuda12_plugin" if ":" in topology and topology[0] in "ah" else "libtpu"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return loop_over_layers(make_mesh(MeshConfig(), open_topology(topology).devices))


def between(text, kind):
    """For each asynchronous collective of a kind, how many operations stand between its start and its end."""
    lines, found = text.splitlines(), []
    for place, line in enumerate(lines):
        if start := re.search(rf"%?(\S+) = .* {kind}-start\(", line):
            end = next(n for n in range(place, len(lines)) if re.search(rf"-done\(.*%?{start[1]}\)", lines[n]))
            found.append(sum(" fusion(" in line or " custom-call(" in line for line in lines[place:end]))
    return found


@pytest.mark.aot
@pytest.mark.parametrize(("topology", "row"), [("a100:8", SCHEDULER), ("a100:8", GATHER), ("h100:8", GATHER)])
def test_a_row_changes_the_program_and_more_is_done_while_data_are_on_their_way(topology, row):
    lowered = lowered_for(topology)
    others = {other.name: other.value for other in GPU if other.name != row}
    kind = "reduce-scatter" if row == SCHEDULER else "all-gather"
    compile_with = lambda options: lowered.compile(compiler_options=options).as_text()
    without, within = between(compile_with(others), kind), between(compile_with(USUAL), kind)
    assert max(within) > max(without)


@pytest.mark.aot
def test_with_more_fast_memory_a_product_is_taken_in_fewer_tiles():
    pytest.importorskip("libtpu")
    device = open_topology("v5p:2x2x1").devices[0]
    make = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(device))
    product = jax.jit(lambda x, y, w: x + jax.nn.silu(y) @ w)
    lowered = product.lower(make(4, 4096, 4096), make(4, 4096, 11_008), make(11_008, 4096))

    def tiles(options):
        found = re.findall(r'"iteration_bounds":\[([^]]*)\]', lowered.compile(compiler_options=options).as_text())
        return [math.prod(int(bound.strip('"')) for bound in bounds.split(",")) for bounds in found]

    (many,), (few,) = tiles(None), tiles(compiler_options("tpu", device.device_kind, {}, {}).values)
    assert few < many


@pytest.mark.aot
def test_the_compiler_knows_the_name_of_every_row_for_gpus():
    pytest.importorskip("jax_cuda12_plugin")
    check_options(USUAL | {OVERLAP: 16, SLICE_FUSION: False}, open_topology("h100:8").devices[0])


@pytest.mark.aot
def test_gradients_are_scattered_each_for_itself():
    lowered = lowered_for("h100:8")
    without = {name: value for name, value in USUAL.items() if name != APART}
    arrays = lambda options: [
        len(re.findall(r"\w+\[", scatter)) // 2  # each as it goes in and as it comes out
        for scatter in re.findall(
            r"= (\(.*\)) reduce-scatter-start\(", lowered.compile(compiler_options=options).as_text()
        )
    ]
    assert max(arrays(without)) == 2 and set(arrays(USUAL)) == {1}


@pytest.mark.aot
@pytest.mark.parametrize("name", ON_BY_DEFAULT["tpu"])
def test_what_is_on_already_is_so_in_this_compiler(name):
    lowered = lowered_for("v5e:2x4")
    usual = program_text(lowered, None)
    assert program_text(lowered, {name: True}) == usual
    assert program_text(lowered, {name: False}) != usual
