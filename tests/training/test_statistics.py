"""Statistics are what a plain computation on the whole model gives, on any mesh, and leave training as it is.

B batch  T query position  S key position  D embed  N query heads  K kv heads  H head dim
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.core.models.layers import merge_model
from jaxscale.core.models.model import summed_loss
from jaxscale.core.plan import UNSHARDED
from jaxscale.core.recorder import NO_RECORDER
from jaxscale.core.statistics import EMBEDDING, HEAD, NORMS, outer_group, statistics_groups
from jaxscale.kernels.norm import rms_norm
from jaxscale.kernels.rope import make_rotation, rotate
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.training.statistics_runner import flatten_statistics

pytestmark = pytest.mark.slow

BATCH = tiny.packed_batch(0)


def statistics(program, batch=BATCH, state=None):
    """{name: number} at the beginning of a run."""
    found = program.statistics(program.init() if state is None else state, tiny.on_mesh(program, batch))
    return flatten_statistics(jax.device_get(found))


def column(found, name):
    return [value for key, value in found.items() if key.startswith(f"stats/{name}/")]


@pytest.fixture(scope="module")
def one_device():
    return statistics(tiny.program())


def assert_close(found, expected, rtol=1e-5):
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, err_msg=name)


# The plain reference.


def unrolled(params, layers):
    """Stacked blocks as a list of blocks."""
    at = lambda layer: jax.tree.map(lambda leaf: leaf[layer], params["blocks"])
    return params | {"blocks": {str(layer): at(layer) for layer in range(layers)}}


def plain_model(cfg, params):
    """The whole model on one device, layer by layer."""
    return merge_model(tiny.graphdef(cfg), params)


def rms(x_BTD, text_BT):
    """Over all entries of the positions with text."""
    return float(np.sqrt(np.mean(np.square(np.asarray(x_BTD, np.float64))[text_BT])))


def norm(tree):
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(tree))))


def reference(cfg, params, batch):
    """{name: number} of activations and attention of a Llama, from its definition."""
    model, found, text_BT = plain_model(cfg, params), {}, batch.segment_ids > 0
    x_BTD = model.embedding[...][batch.tokens]
    rotation = make_rotation(jnp.asarray(batch.positions), cfg.head_dim, cfg.rope_base, None)
    for layer, block in enumerate(model.blocks):
        h_BTD = rms_norm(x_BTD, block.attention_norm[...], cfg.norm_eps)
        q_BTNH = rotate(jnp.einsum("BTD,DNH->BTNH", h_BTD, block.attention.wq[...]), rotation)
        k_BSKH = rotate(jnp.einsum("BSD,DKH->BSKH", h_BTD, block.attention.wk[...]), rotation)
        k_BSNH = jnp.repeat(k_BSKH, cfg.num_heads // cfg.num_kv_heads, axis=2)
        score_BNTS = np.asarray(jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH)) / cfg.head_dim**0.5
        same_BTS = batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :]
        seen_BTS = same_BTS & np.tri(batch.tokens.shape[1], dtype=bool)[None] & text_BT[:, :, None]
        found[f"stats/attention_logit_max/{layer:02}"] = score_BNTS.max(where=seen_BTS[:, None], initial=-np.inf)
        added_BTD = block.attention(h_BTD, rotation, jnp.asarray(batch.segment_ids))
        found[f"stats/attention_rms/{layer:02}"] = rms(added_BTD, text_BT)
        x_BTD = x_BTD + added_BTD
        added_BTD = block.mlp(rms_norm(x_BTD, block.mlp_norm[...], cfg.norm_eps))
        found[f"stats/mlp_rms/{layer:02}"] = rms(added_BTD, text_BT)
        x_BTD = x_BTD + added_BTD
        found[f"stats/activation_rms/{layer:02}"] = rms(x_BTD, text_BT)
    return found


def by_group(name, tree):
    """{name: norm} of each group of a Llama's unrolled parameters."""
    groups = tree["blocks"] | {"embedding": tree["embedding"], "head": tree["head"], "norms": tree["final_norm"]}
    return {f"stats/{name}/{int(key):02}" if key.isdigit() else f"stats/{name}/{key}": norm(part)
            for key, part in groups.items()}  # fmt: skip


def test_numbers_are_those_of_a_plain_computation(one_device):
    program = tiny.program()
    cfg = tiny.config({"model.scan_layers": False}).model
    state = program.init()
    params = unrolled(tiny.host(state.params), cfg.num_layers)

    def mean_loss(params):
        total, _ = summed_loss(plain_model(cfg, params), jax.tree.map(jnp.asarray, BATCH), None, {})
        return total / BATCH.weights.sum()

    grads = jax.jit(jax.grad(mean_loss))(params)
    state, _ = program.train_step(state, tiny.on_mesh(program, BATCH))
    after = unrolled(tiny.host(state.params), cfg.num_layers)
    updates, weights = (
        by_group("update_norm", jax.tree.map(np.subtract, after, params)),
        by_group("weight_norm", params),
    )
    expected = reference(cfg, params, BATCH) | by_group("grad_norm", grads) | updates | weights
    for name, update in updates.items():
        group = name.rpartition("/")[2]
        expected[f"stats/update_ratio/{group}"] = update / weights[f"stats/weight_norm/{group}"]
    assert set(one_device) == set(expected)
    for name, value in expected.items():  # a difference of two roundings is less exact than what was added
        np.testing.assert_allclose(one_device[name], value, rtol=1e-3 if "update" in name else 2e-5, err_msg=name)


def test_norms_of_the_groups_make_up_the_norm_of_the_step(one_device):
    program = tiny.program()
    _, metrics = program.train_step(program.init(), tiny.on_mesh(program, BATCH))
    np.testing.assert_allclose(np.linalg.norm(column(one_device, "grad_norm")), metrics["grad_norm"], rtol=1e-6)


def test_padding_is_left_out(one_device):
    tokens_BT = np.where(BATCH.segment_ids > 0, BATCH.tokens, (BATCH.tokens + 1) % tiny.VOCAB)
    assert (tokens_BT != BATCH.tokens).any()
    changed = statistics(tiny.program(), BATCH._replace(tokens=tokens_BT))
    for name in ("activation_rms", "attention_rms", "mlp_rms", "attention_logit_max"):
        assert column(changed, name) == column(one_device, name)


# The same on any mesh and in any form.

soak = lambda *case: pytest.param(*case, marks=pytest.mark.soak)
MESHES = [
    soak({"mesh.data": 8, "mesh.fsdp": 1, "train.num_microbatches": 2}, 8),
    soak({"rules": "zero3"}, 8),
    soak({"rules": "zero2", "train.num_microbatches": 2, "mesh.data": 2, "mesh.fsdp": 4}, 8),
    soak({"rules": "zero1"}, 8),
    ({"mesh.fsdp": 2}, 2),
    soak({"mesh.tensor": 2, "train.num_microbatches": 4}, 8),
    soak({"train.num_microbatches": 4, "model.scan_layers": False, "model.remat": "full"}, 1),
    soak({"model.remat": "minimal", "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}, 8),
    soak({"optim.offload_moments": True}, 8),
    soak({"optim.offload_params": True}, 8),
]


@pytest.mark.parametrize(("overrides", "num_devices"), MESHES, ids=str)
def test_numbers_do_not_depend_on_the_mesh_and_the_program_compiles_once(overrides, num_devices, one_device):
    program = tiny.program(overrides, num_devices)
    assert_close(statistics(program), one_device)
    statistics(program, tiny.packed_batch(1))
    assert program.statistics._cache_size() == 1


def test_blockwise_attention_is_watched_exactly(one_device):
    assert_close(statistics(tiny.program({"model.attention": "blockwise"})), one_device)


# Other models.

TEXT = "".join(f"{i} sheep and {i + 1} goats went up the hill. " for i in range(40))
VOCAB = 296
SPANS = dict(name="span_corruption", first_sentinel_id=264, num_sentinels=32, multiple_of=2)
OTHERS = {
    "gpt2": (tiny.GPT2 | {"dropout": 0.1}, dict(name="next_token")),
    "encoder": (tiny.ENCODER | {"dropout": 0.1}, dict(name="masked_lm", mask_id=257)),
    "t5": (tiny.T5 | {"dropout": 0.1}, SPANS),
    "llama with a prefix": (tiny.LLAMA, dict(name="prefix_lm")),
}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "hill.jsonl"
    path.write_text("".join(f'{{"text": "{TEXT[at : at + 90]}"}}\n' for at in range(0, len(TEXT), 90)))
    return str(path)


def other_statistics(name, text_file, mesh, num_devices):
    model, objective = OTHERS[name]
    data = dict(name="files", files=text_file, objective=objective, val_fraction=0.0)
    cfg = tiny.config({"model": model | {"vocab_size": VOCAB}, "data": data} | mesh)
    program = make_program(cfg, resolve_budget(cfg, None), jax.devices()[:num_devices])
    corpus = open_data(cfg.data, seq_len=cfg.seq_len, vocab_size=VOCAB, seed=1, say=lambda text: None)
    return statistics(program, corpus.batches(cfg.rows_per_step).batch(0))


@pytest.mark.soak
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_give_the_same_numbers_on_any_mesh(name, text_file):
    alone = other_statistics(name, text_file, {}, 1)
    assert_close(other_statistics(name, text_file, {"mesh.fsdp": 4, "mesh.tensor": 2}, 8), alone)
    assert all(np.isfinite(value) and value > 0 for value in alone.values())
    layers = 3 if name == "t5" else 2
    assert len(column(alone, "activation_rms")) == len(column(alone, "attention_logit_max")) == layers
    assert len(column(alone, "across_rms")) == (1 if name == "t5" else 0)


# Names.


def test_layers_are_numbered_through_all_stacks_and_in_the_order_of_their_text():
    values = np.arange(101.0)
    found = {"mlp_rms": {"100": values[100:], "0": values[:100]}, "grad_norm": {"0": values, "head": np.float32(7)}}
    names = list(flatten_statistics(found))
    assert names == sorted(names) and names[0] == "stats/grad_norm/000" and "stats/grad_norm/head" in names
    assert (
        flatten_statistics(found)["stats/mlp_rms/100"] == 100 and flatten_statistics(found)["stats/mlp_rms/042"] == 42
    )


GROUPS = {
    "embedding": (EMBEDDING, ("vocab", "embed")),
    "position_embedding": (EMBEDDING, ("position", "embed")),
    "encoder_bias": (EMBEDDING, ("position", "heads")),
    "scale_embedding": (NORMS, ("norm",)),
    "final_norm": (NORMS, ("norm",)),
    "head": (HEAD, ("embed", "vocab")),
    "head/scale": (HEAD, ("norm",)),
    "bias_vocab": (HEAD, ("vocab",)),
}


@pytest.mark.parametrize("path", GROUPS)
def test_what_is_outside_of_blocks_is_an_embedding_a_head_or_a_norm(path):
    group, axes = GROUPS[path]
    assert outer_group(path, axes) == group


def test_stacks_follow_each_other_as_a_batch_goes_through_them():
    axes = {
        "decoder_blocks": {"wq": ("layers", "embed")},
        "encoder_blocks": {"0": {"wq": ("embed",)}, "1": {"wq": ("embed",)}},
        "head": ("embed", "vocab"),
    }
    groups = statistics_groups(axes, {"encoder_blocks": 2, "decoder_blocks": 3})
    assert (groups.num_layers, groups.outer_names) == (5, (HEAD,))
    assert [np.asarray(place).tolist() for place in groups.indices] == [[2, 3, 4], 0, 1, 5]


# Training has no trace of it.


@pytest.mark.soak
def test_a_step_is_the_same_program_whether_it_is_watched_or_not():
    text = {}
    for every in (0, 1):
        program = tiny.program({"monitor.statistics_every_steps": every, "mesh.tensor": 2}, 8)
        if every:
            statistics(program)
        text[every] = program.train_step.lower(program.abstract_state, program.abstract_batch).as_text()
    assert text[0] == text[1]


def test_a_recorder_of_nothing_leave_no_trace():
    x = jnp.ones((1, 1, 1))
    assert NO_RECORDER.sow("mlp", x) is x and NO_RECORDER.end_layer(x) is None and NO_RECORDER.sown() == {}
    assert UNSHARDED.with_recorder(NO_RECORDER) is UNSHARDED
