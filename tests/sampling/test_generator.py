"""Text that is written with a cache is the text of full passes over all that was read.

B batch  T position  V vocab
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale import schema
from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.layers import merge_model, split_model
from jaxscale.core.models.model import logits, make_model
from jaxscale.core.models.sharded import shard_model
from jaxscale.core.plan import resolve_plan, single_device_plan
from jaxscale.runtime.sampling.config import GREEDY, Sampling
from jaxscale.runtime.sampling.generator import (
    ENDED,
    NOT_FINITE,
    DecodeState,
    Engine,
    Generator,
    NotFinite,
    prompt_length,
    prompt_numbers,
)
from jaxscale.runtime.sampling.kv_cache import Cache

LLAMA_KIND = dict(attention_window=5, attention_softcap=3.0, qk_norm=True, logit_softcap=8.0)
LATENT = tiny.LLAMA | dict(
    num_kv_heads=4, head_dim=12, latent=dict(kv_rank=8, q_rank=12, nope_dim=8, rope_dim=4, value_dim=10),
    rope_scaling=dict(name="yarn", factor=4.0, original_max_len=8, mscale=1.0, mscale_all_dim=0.8),
)  # fmt: skip
MODELS = {
    "llama": tiny.LLAMA | LLAMA_KIND,
    "llama, every key": tiny.LLAMA | {"rope_scaling": {"name": "linear", "factor": 2.0}},
    "llama, unrolled": tiny.LLAMA | LLAMA_KIND | {"scan_layers": False},
    "gemma": tiny.LLAMA
    | dict(num_layers=3, global_every=3, attention_window=5, local_rope_base=100.0, norm_placement="both")
    | dict(out_bias=True, rope_scaling=dict(name="yarn", factor=4.0, original_max_len=8))
    | dict(zero_centred_norms=True, activation="gelu_tanh", scaled_embeddings=True, query_scalar=12.0, qk_norm=True),
    "olmo": tiny.LLAMA
    | dict(norm_placement="after", qk_norm=True, qk_norm_over="all_heads", scan_layers=False)
    | dict(mup=dict(base_dim=8, base_head_dim=4, base_layers=1)),
    "latent": LATENT | dict(experts=dict(number=4, chosen=2, mlp_dim=16, shared_dim=8, first_dense=1, score="sigmoid")),
    "latent, a window": LATENT
    | dict(latent=LATENT["latent"] | dict(q_rank=0), attention_window=5, attention_softcap=3.0, scan_layers=False),
    "gpt2": tiny.GPT2,
    "gpt2, unrolled": tiny.GPT2 | {"scan_layers": False},
}
MESHES = {"one": {}, "data=2": {"data": 2, "fsdp": 1}, "fsdp=4": {"fsdp": 4}, "tensor=2": {"tensor": 2, "fsdp": 1}}
LONGEST = 24


def shard(cfg, mesh):
    """A model with the plan of inference."""
    return shard_model(cfg, resolve_plan(cfg, mesh))


@functools.cache
def config(name):
    return schema.convert(MODELS[name], AnyModelConfig, "model")


@functools.cache
def params_of(name):
    """Larger than at the start, so that the likeliest token is clear and attention is not even."""
    _, params, _ = split_model(make_model(config(name), key=jax.random.key(3)))
    return jax.tree.map(lambda leaf: leaf * 3 if leaf.ndim > 1 else leaf, params)


@functools.cache
def engine(name, mesh, batch=4, longest=LONGEST, num_ids=None):
    shape = MESHES[mesh] or {"fsdp": 1}
    devices = jax.devices()[: math.prod(shape.values())]
    sharded = shard(config(name), make_mesh(MeshConfig(**shape), devices))
    return Engine(sharded, batch=batch, longest=longest, num_ids=num_ids)


def generator(name, mesh, **more):
    made = engine(name, mesh, **more)
    return Generator(made, jax.device_put(params_of(name), made.sharded.shardings))


@functools.cache
def uncached(name):
    """All logits of rows of LONGEST tokens, by the definition of attention, on one device."""
    cfg = config(name)
    needs = cfg.attention_needs()
    plan = single_device_plan("gpu", "xla", needs)
    make = lambda key: make_model(cfg, key=key, plan=plan)
    graphdef, _, _ = split_model(jax.eval_shape(make, jax.random.key(0)))
    return jax.jit(lambda tokens_BT: logits(merge_model(graphdef, params_of(name)), tokens_BT))


def full_logits(name, row):
    """float32[V] after the last token of a row."""
    padded_BT = np.zeros((1, LONGEST), np.int32)
    padded_BT[0, : len(row)] = row
    return np.asarray(uncached(name)(padded_BT))[0, len(row) - 1]


PROMPTS = [np.random.default_rng(n).integers(0, tiny.VOCAB, length).tolist() for n, length in enumerate((3, 11, 1, 7))]
# A window's few slots and soft-caps; latents on several devices, in two stacks of layers.
QUICK = [("gemma", "one"), ("latent", "tensor=2")]
SLOW = [(kind, mesh) for kind in MODELS for mesh in MESHES if (kind, mesh) not in QUICK]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name, mesh", [*QUICK, *(pytest.param(*pair, marks=pytest.mark.soak) for pair in SLOW)])
def test_the_likeliest_tokens_are_those_of_full_passes(name, mesh):
    steps = np.stack(list(generator(name, mesh).generate(PROMPTS, GREEDY, 12)), axis=1)
    assert steps.shape == (4, 12)
    for prompt, text in zip(PROMPTS, steps):
        row = list(prompt)
        for token in text.tolist():
            assert token == int(np.argmax(full_logits(name, row)))
            row.append(token)


@pytest.mark.slow
def test_of_latents_the_cache_has_no_number_of_any_head():
    made, rows = engine("latent", "one"), jax.ShapeDtypeStruct((4,), jnp.int32)
    tokens_BT = jax.ShapeDtypeStruct((4, 16), jnp.int32)
    cache, _ = jax.eval_shape(made.read_prompts, made.sharded.shapes, tokens_BT, rows)
    assert sum(leaf.size for leaf in cache) == 2 * 4 * LONGEST * (8 + 4)  # layers, rows, slots, rank and part with RoPE


@pytest.mark.slow
def test_a_penalty_is_for_the_tokens_of_the_prompt_and_for_those_drawn_since():
    steps = list(generator("llama", "one").generate(PROMPTS, Sampling(temperature=0.0, repetition_penalty=5.0), 8))
    texts, plain = np.stack(steps, axis=1).tolist(), 0
    for prompt, text in zip(PROMPTS, texts):
        row = list(prompt)
        for token in text:
            logits_V = full_logits("llama", row).copy()
            plain += token == int(np.argmax(logits_V))
            seen = sorted(set(row))
            logits_V[seen] = np.where(logits_V[seen] > 0, logits_V[seen] / 5, logits_V[seen] * 5)
            assert token == int(np.argmax(logits_V))
            row.append(token)
    assert plain < 32  # it mattered


@pytest.mark.soak
@pytest.mark.parametrize("name, mesh", [("llama", "tensor=2"), ("gpt2", "fsdp=4")])
def test_logits_are_those_of_full_passes(name, mesh):
    made = engine(name, mesh)
    params = jax.device_put(params_of(name), made.sharded.shardings)
    specs, rows, cache = made.sharded.specs, made.rows_spec, Cache(made.cache_spec, made.cache_spec)
    spread = made.sharded.plan.batch_axes.shard_map
    read = jax.jit(spread(made.read_prompts, (specs, rows, rows), (cache, rows)))
    go_on = jax.jit(spread(made.read_one, (specs, cache, rows, rows), (cache, rows)))
    tokens_BT, lengths_B, *_ = Generator(made, params).shard_arguments(PROMPTS, [0] * 4, 0)
    texts = [list(prompt) for prompt in PROMPTS]
    held, found_BV = read(params, tokens_BT, lengths_B)
    rng = np.random.default_rng(5)
    for _ in range(8):
        wanted_BV = np.stack([full_logits(name, text) for text in texts])
        np.testing.assert_allclose(found_BV, wanted_BV, rtol=1e-5, atol=1e-5)  # float32 sums in another order
        new_B = rng.integers(0, tiny.VOCAB, 4).astype(np.int32)
        held, found_BV = go_on(params, held, new_B, lengths_B)
        lengths_B = lengths_B + 1
        for text, token in zip(texts, new_B):
            text.append(int(token))


def text_of(made, prompts, row, settings, seed, numbers=None, steps=10):
    return [int(step[row]) for step in made.generate(prompts, settings, steps, seed=seed, numbers=numbers)]


@pytest.mark.soak
def test_the_same_seed_gives_the_same_text_whatever_the_mesh_and_the_batch():
    settings = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.2)
    alone = text_of(generator("llama", "one", batch=1), [PROMPTS[3]], 0, settings, 7)
    for mesh in ("fsdp=4", "tensor=2"):
        assert text_of(generator("llama", mesh), PROMPTS, 3, settings, 7) == alone
    assert text_of(generator("llama", "one", batch=1), [PROMPTS[3]], 0, settings, 8) != alone


@pytest.mark.slow
def test_equal_prompts_get_different_texts_and_each_of_them_can_be_had_alone():
    settings, made, prompt = Sampling(temperature=1.0), generator("llama", "one"), PROMPTS[1]
    first, second = (text_of(made, [prompt, PROMPTS[0], prompt], row, settings, 3) for row in (0, 2))
    assert first != second and text_of(made, [prompt], 0, settings, 3) == first
    assert text_of(made, [prompt], 0, settings, 3, numbers=prompt_numbers([prompt, prompt])[1:]) == second
    assert text_of(made, [prompt], 0, settings, 4) != first


def test_each_prompt_draws_by_itself_whatever_is_beside_it():
    numbers = prompt_numbers([[1, 2], [1], [1, 2], [], [2, 1]])
    assert len(set(numbers)) == 5 and prompt_numbers([[1]]) == numbers[1:2]
    assert prompt_numbers([[7], [1, 2], [1, 2]])[1:] == [numbers[0], numbers[2]]
    assert all(0 <= number < 2**31 for number in prompt_numbers([[token] for token in range(99)]))  # as int32 holds


@pytest.mark.slow
def test_a_model_that_gives_no_numbers_is_told_and_writes_nothing():
    made = generator("llama", "one")
    broken = Generator(made.engine, jax.tree.map(lambda leaf: leaf * np.nan, made.params))
    with pytest.raises(NotFinite, match="the logits of token 1 after prompt 1 are not finite: .* overflow float32"):
        next(broken.generate(PROMPTS[:2], GREEDY, 8))


def test_logits_that_are_no_numbers_end_no_text_though_a_stop_token_is_the_first_of_all():
    zeros_B, logits_BV = jnp.zeros(2, jnp.int32), jnp.stack([jnp.full(64, jnp.nan), jax.nn.one_hot(5, 64)])
    state = DecodeState(None, zeros_B + 1, zeros_B, zeros_B > 0, zeros_B, zeros_B, None, jnp.uint32(0))
    _, tokens_B = engine("llama", "one").draw(state, logits_BV, GREEDY, (0,))
    assert tokens_B.tolist() == [NOT_FINITE, 5]


@pytest.mark.slow
def test_a_row_ends_before_a_stop_token_and_the_others_go_on():
    made = generator("llama", "one")
    whole = np.stack(list(made.generate(PROMPTS, GREEDY, 8)), axis=1)
    stop = int(whole[1, 3])
    ended = np.stack(list(made.generate(PROMPTS, GREEDY, 8, stop_ids=[stop])), axis=1)
    for before, after in zip(whole.tolist(), ended.tolist()):
        at = before.index(stop) if stop in before else len(before)
        assert after == (before[:at] + [ENDED] * 8)[: len(after)]
    assert (ended == ENDED).any()


@pytest.mark.slow
def test_a_text_ends_where_the_model_can_read_no_more():
    made = generator("gpt2", "one", longest=12)
    steps = np.stack(list(made.generate(PROMPTS, GREEDY, 30)), axis=1)
    assert [(row != ENDED).sum() for row in steps] == [12 - len(prompt) for prompt in PROMPTS]


@pytest.mark.soak  # make_sample's are, by default
def test_ids_behind_the_tokenizer_are_never_drawn():
    made = generator("llama", "one", num_ids=5)
    drawn = np.concatenate(list(made.generate(PROMPTS, Sampling(temperature=50.0), 12)))
    assert set(drawn.tolist()) == set(range(5))


def test_time_of_prompts_and_of_new_tokens_is_told_apart():
    made = generator("llama", "one")
    list(made.generate(PROMPTS, GREEDY, 6))
    timing = made.timing
    assert (timing.prompt_tokens, timing.decoded_tokens) == (22, 20) and timing.prefill_seconds > 0
    list(made.generate(PROMPTS, GREEDY, 6))
    assert made.timing.compile_seconds < 0.1  # compiled once


@pytest.mark.parametrize(
    "prompts, told",
    [
        ([], "0 prompts for a batch of 4"),
        ([[1]] * 5, "5 prompts for a batch of 4"),
        ([[1], []], "prompt 2 has no token"),
        ([[1] * 25], "prompt 1 has 25 tokens, but at most 24 fit"),
        ([[64]], "token id 64, but the model has 64 ids"),
        ([[-1, 5]], "token id -1, but the model has 64 ids"),
    ],
)
def test_prompts_that_cannot_be_gone_on_from_are_refused(prompts, told):
    with pytest.raises(ValueError, match=told):
        next(generator("llama", "one").generate(prompts, GREEDY, 3))


def test_models_that_cannot_write_or_read_so_far_are_refused():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(ValueError, match="a text of 33 tokens exceeds model.max_seq_len=32"):
        Engine(shard(config("gpt2"), mesh), batch=1, longest=33)
    encoder = schema.convert(tiny.ENCODER, AnyModelConfig, "model")
    with pytest.raises(ValueError, match="'encoder' is not a decoder"):
        Engine(shard(encoder, mesh), batch=1, longest=8)


def test_prompts_are_filled_up_to_one_of_few_lengths():
    assert [prompt_length(tokens, 100) for tokens in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 100]
