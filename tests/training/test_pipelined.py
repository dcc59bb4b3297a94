"""A run whose layers are cut into stages is the run of one device: every model, schedule and rule table."""

import json

import jax
import numpy as np
import pytest
import tiny

from jaxscale import main, schema
from jaxscale.build import make_program
from jaxscale.config import RunConfig
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.sampling.config import Sampling
from jaxscale.runtime.sampling.generator import Engine, Generator
from jaxscale.runtime.training.statistics_runner import flatten_statistics
from jaxscale.system.exits import BadInput

BATCH = tiny.packed_batch(0)
BASE = {"model.remat": "full", "optim.name": "sgd", "optim.b1": 1e-30, "train.num_microbatches": 4}
MASKED = {"data.objective": dict(name="masked_lm", mask_id=63)}
WHOLE = {"pipeline.head": "whole", "mesh.pipeline": 2}


def make(overrides, num_devices, model=tiny.LLAMA):
    cfg = schema.from_dict(RunConfig, schema.merge(tiny.VALUES | {"model": model}, BASE | overrides))
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:num_devices])


def step(overrides, num_devices, model=tiny.LLAMA, steps=1, state=None):
    """(metrics of the last step, gradients), on the host: the momentum of 1e-30 holds the gradient and nothing else."""
    program = make(overrides, num_devices, model)
    state = program.init() if state is None else tiny.placed(program, state)
    for _ in range(steps):
        state, metrics = program.train_step(state, tiny.on_mesh(program, BATCH))
    return tiny.host((metrics, jax.tree.leaves(state.opt_state)))


RUNS = {  # (model, settings of the run, how it is cut, devices)
    "uneven stages": (
        tiny.LLAMA,
        {"model.num_layers": 5, "train.aux_losses": {"z_loss": 1e-2}, "train.ema.decay": 0.9},
        {"mesh.pipeline": 2, "mesh.tensor": 2},
        4,
    ),
    "a shorter last stage": (
        tiny.LLAMA, {"model.num_layers": 5}, WHOLE | {"mesh.fsdp": 2, "train.loss_scale.initial": 8.0}, 4,
    ),
    "chunks": (tiny.LLAMA, {"model.num_layers": 6}, {"mesh.pipeline": 2, "mesh.fsdp": 2, "pipeline.chunks": 3}, 4),
    "windows, tied": (tiny.RELATIVE, {}, {"mesh.pipeline": 2, "mesh.fsdp": 2, "mesh.tensor": 2}, 8),
    "dropout": (tiny.GPT2 | {"dropout": 0.3}, {}, {"mesh.pipeline": 2, "mesh.data": 2, "mesh.tensor": 2}, 8),
    "adapters": (tiny.LLAMA, {"lora.rank": 4}, {"mesh.pipeline": 2, "mesh.fsdp": 2}, 4),
    "a bias of the vocabulary": (
        tiny.ENCODER, MASKED | {"model.num_layers": 3}, {"mesh.pipeline": 2, "mesh.tensor": 2}, 4,
    ),
    "zero1": (tiny.LLAMA, {"rules": "zero1", "model.num_layers": 3}, {"mesh.pipeline": 2, "mesh.fsdp": 2}, 4),
}  # fmt: skip
QUICK = ("chunks",)


@pytest.mark.parametrize(
    "run", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in RUNS]
)
def test_losses_and_gradients_are_those_of_one_device(run):
    model, settings, cut, devices = RUNS[run]
    remat = model | {"remat": "full"}
    first = tiny.host(make(settings | {"mesh.fsdp": 1}, 1, remat).init())
    one, one_grads = step(settings | {"mesh.fsdp": 1}, 1, remat, state=first)
    many, many_grads = step(settings | {"mesh.fsdp": 1} | cut, devices, remat, state=first)
    np.testing.assert_array_equal(many["tokens_seen"], one["tokens_seen"])
    assert one.keys() == many.keys() and many["real_tokens"] == one["real_tokens"]
    for name in ("loss", "objective", "grad_norm"):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-5)
    for got, right in zip(many_grads, one_grads, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5 * max(np.abs(right).max(), 1e-2))


@pytest.fixture(scope="module")
def plain():
    """Two steps without stages, on devices that have other rows: with one device XLA compiles other sums."""
    return step({"mesh.data": 2, "mesh.fsdp": 1, "model.num_layers": 4}, 2, steps=2)


@pytest.mark.soak
@pytest.mark.parametrize("how", [{}, {"pipeline.schedule": "gpipe", "pipeline.chunks": 2}], ids=str)
def test_with_a_whole_head_every_bit_is_that_of_no_pipeline(plain, how):
    cut = WHOLE | how | {"mesh.data": 2, "mesh.fsdp": 1, "model.num_layers": 4}
    metrics, grads = step(cut, 4, steps=2)
    assert metrics["loss"] == plain[0]["loss"] and metrics["real_tokens"] == plain[0]["real_tokens"]
    tiny.assert_same_bits(grads, plain[1])  # their norm may be summed in another order


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        "tied",
        pytest.param("tied, four stages", marks=pytest.mark.soak),
        pytest.param("adapters", marks=pytest.mark.soak),
        pytest.param("windows, uneven", marks=pytest.mark.soak),
        pytest.param("chunks, half precision", marks=pytest.mark.soak),
    ],
)
def test_a_zero_bubble_has_the_gradients_of_1f1b_in_another_order(run):
    model, settings, cut, devices = {
        "tied": (tiny.LLAMA | {"tied_embeddings": True}, {}, {"mesh.pipeline": 2}, 2),
        "tied, four stages": (
            tiny.LLAMA | {"tied_embeddings": True},
            {"model.num_layers": 4},
            {"mesh.pipeline": 4},
            4,
        ),
        "adapters": (
            tiny.LLAMA | {"tied_embeddings": True},
            {"model.num_layers": 4, "lora.rank": 4},
            WHOLE | {"mesh.pipeline": 4, "mesh.tensor": 2},
            8,
        ),
        "windows, uneven": (tiny.RELATIVE, {"model.num_layers": 5}, {"mesh.pipeline": 4, "mesh.fsdp": 2}, 8),
        "chunks, half precision": (
            tiny.GPT2 | {"dropout": 0.3},
            {"model.num_layers": 4, "train.loss_scale.initial": 8.0},
            {"mesh.pipeline": 2, "pipeline.chunks": 2, "mesh.data": 2},
            4,
        ),
    }[run]
    here = settings | {"mesh.fsdp": 1} | cut
    (one, one_grads), (zero, zero_grads) = (
        step(here | {"pipeline.schedule": name}, devices, model | {"remat": "full"}) for name in ("1f1b", "zero_bubble")
    )
    assert zero["loss"] == one["loss"] and zero["real_tokens"] == one["real_tokens"]
    for got, right in zip(zero_grads, one_grads, strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-6 * max(np.abs(right).max(), 1e-30))


@pytest.fixture(scope="module")
def programs():
    return make({"mesh.fsdp": 1}, 1), make({"mesh.pipeline": 2, "mesh.fsdp": 2, "mesh.tensor": 2}, 8)


@pytest.mark.soak
def test_evaluation_sampling_and_statistics_need_no_stages(programs):
    found = []
    for program in programs:
        state = program.init()
        nats_BT = jax.jit(program.model.unstaged.token_losses)(
            state.params, jax.device_put(BATCH, program.model.unstaged.rows_sharding)
        )
        engine = Engine(program.model.unstaged, batch=1, longest=16)
        steps = Generator(engine, state.params).generate([[1, 2, 3]], Sampling(temperature=0.0), 8, seed=0)
        numbers = flatten_statistics(jax.device_get(program.statistics(state, tiny.on_mesh(program, BATCH))))
        found.append((np.asarray(nats_BT), [int(ids[0]) for ids in steps], numbers))
    (one_nats, one_ids, one_numbers), (nats, ids, numbers) = found
    np.testing.assert_allclose(nats, one_nats, rtol=1e-4, atol=1e-5)
    assert ids == one_ids and numbers.keys() == one_numbers.keys()
    for name, value in numbers.items():
        np.testing.assert_allclose(value, one_numbers[name], rtol=1e-4, err_msg=name)


@pytest.mark.soak
def test_statistics_where_moments_are_cut_and_parameters_are_not(programs):
    cut = make({"mesh.pipeline": 2, "mesh.fsdp": 2, "rules": "zero2"}, 4)
    wanted, found = (
        flatten_statistics(jax.device_get(program.statistics(program.init(), tiny.on_mesh(program, BATCH))))
        for program in (programs[0], cut)
    )
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_the_state_is_the_same_arrays_whatever_the_stages(programs):
    shapes = lambda program: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), program.abstract_state)
    one, many = programs
    assert shapes(one) == shapes(many)
    tiny.assert_same_bits(tiny.host(one.init()), tiny.host(many.init()))
    layers = many.abstract_state.params["blocks"]["mlp"]["up"]
    assert layers.sharding.shard_shape(layers.shape) == (1, 8, 16)  # layers over stages, fsdp, tensor
    uneven = make({"model.num_layers": 3, "mesh.pipeline": 2, "mesh.fsdp": 2}, 4).abstract_state.params["blocks"]
    up = uneven["mlp"]["up"]
    assert up.shape == (3, 16, 32) and up.sharding.shard_shape(up.shape) == (3, 4, 32)


@pytest.mark.slow
def test_no_other_document_moves_when_a_token_of_one_does(programs):
    program = programs[1]
    changed = BATCH._replace(tokens=BATCH.tokens.copy())
    document = BATCH.segment_ids[1] == 1
    changed.tokens[1, np.flatnonzero(document)[0]] += 1
    params, score = program.init().params, jax.jit(program.model.unstaged.token_losses)
    one, other = (
        np.asarray(score(params, jax.device_put(b, program.model.unstaged.rows_sharding))) for b in (BATCH, changed)
    )
    moved = (one != other) & (BATCH.weights > 0)
    assert moved[1][document].any() and not moved[1][~document].any() and not np.delete(moved, 1, axis=0).any()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model.remat": "none"}, "model.remat='none', because stages save layer inputs"),
        ({"model.scan_layers": False}, "model.scan_layers=false"),
        ({"model.num_layers": 1}, "model.num_layers=1 with pipeline.chunks=1, because each of 2 chunks needs a layer"),
        (
            {"pipeline.chunks": 2, "model.num_layers": 4, "train.num_microbatches": 1},
            "use a multiple of 2, or chunks=1",
        ),
        ({"model.remat_offload": ("block_input",)}, "model.remat_offload=block_input"),
        ({"model.vocab_size": 65}, "vocab=65 is not a multiple of the 2 devices"),
        ({"model.vocab_size": 65, "model.num_layers": 3}, "vocab_size=65"),
    ],
)
def test_what_stages_cannot_do_is_one_line(changes, told):
    with pytest.raises(BadInput) as error:
        make({"mesh.pipeline": 2} | changes, 2)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_statistics_of_arrays_that_not_all_devices_can_share_are_refused():
    cut = {"rules": "zero1", "model.embed_dim": 14, "mesh.pipeline": 2, "mesh.fsdp": 2}
    with pytest.raises(BadInput, match="embed=14 .* the 4 devices along mesh pipeline x fsdp; .* to 0"):
        make(cut, 4)
    make(cut | {"monitor.statistics_every_steps": 0}, 4)


def test_a_model_of_two_stacks_is_refused():
    objective = {"data.objective": dict(name="span_corruption", layout="encoder_decoder")}
    with pytest.raises(BadInput, match="two stacks"):
        make({"mesh.pipeline": 2} | objective, 2, tiny.T5 | {"remat": "full"})


@pytest.mark.soak
def test_a_run_goes_on_with_other_stages_chunks_and_none(tmp_path):
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n" * 200)
    values = tiny.VALUES | dict(
        model=tiny.LLAMA | dict(vocab_size=272, num_layers=6, remat="full"),
        data=dict(files=str(tmp_path / "*.txt")),
        train=dict(num_microbatches=4),
        batch_tokens="32 rows",
        train_tokens="16 steps",
        mesh=dict(fsdp=-1),
        eval=dict(every_steps=8, num_rows=8),
        checkpoint=dict(save_every_steps=4),
        monitor=dict(log_every_steps=1, tensorboard=False),
    )
    (tmp_path / "staged.py").write_text(f"def get_config():\n    return {values!r}\n")
    config, straight, workdir = f"--config={tmp_path / 'staged.py'}", tmp_path / "straight", tmp_path / "run"
    assert main.main([config, f"--workdir={straight}"]) == 0
    for stop, flags in (
        (4, ["--config.mesh.pipeline=2"]),
        (8, ["--config.mesh.pipeline=4", "--config.mesh.fsdp=2"]),  # 6 layers on 4 stages
        (12, ["--config.mesh.pipeline=2", "--config.pipeline.chunks=3", "--config.mesh.tensor=2"]),
        (16, []),
    ):
        assert main.main([config, f"--workdir={workdir}", f"--stop_after={stop}", *flags]) in (0, None), flags
    found, wanted = (losses(folder) for folder in (workdir, straight))
    assert sorted(found) == sorted(wanted) == list(range(1, 17))
    np.testing.assert_allclose([found[step] for step in wanted], list(wanted.values()), rtol=1e-5)


def losses(workdir):
    """{step: loss} as written."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
