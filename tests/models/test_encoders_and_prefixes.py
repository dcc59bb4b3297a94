"""What holds for models that read ahead: within a document and nowhere else, as far as the prefix and no farther.

B batch  T position  S position of the encoder's row
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale.core.batch import EncoderInput
from jaxscale.core.models.gpt2_bert_t5_config import EncoderConfig, Gpt2Config, T5Config
from jaxscale.core.models.layers import merge_model, split_model
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.model import hidden_states, logits, make_model
from jaxscale.kernels.attention.xla import MaskSpec

T = 16
DECODERS = {"llama": LlamaConfig(**tiny.LLAMA), "gpt2": Gpt2Config(**tiny.GPT2)}
READERS = {"encoder": EncoderConfig(**tiny.ENCODER), "t5": T5Config(**tiny.T5)}


@functools.cache
def parts(cfg):
    """(graphdef, parameters larger than at the start, to show differences)."""
    graphdef, params, _ = split_model(make_model(cfg, key=jax.random.key(3)))
    return graphdef, jax.tree.map(lambda leaf: 3 * leaf, params)


@functools.cache
def forward(cfg):
    graphdef, params = parts(cfg)
    return jax.jit(lambda *inputs, **more: logits(merge_model(graphdef, params), *inputs, **more))


def scoped(cfg, tokens_BT, batch, prefix_BT):
    segments = batch.segment_ids if prefix_BT is None else MaskSpec(batch.segment_ids, prefix_BT)
    return np.asarray(forward(cfg)(tokens_BT, batch.positions, segments))


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_a_prefix_of_no_token_is_plain_causal_reading(name):
    batch, cfg = tiny.packed_batch(5, rows=4), DECODERS[name]
    plain = scoped(cfg, batch.tokens, batch, None)
    np.testing.assert_array_equal(scoped(cfg, batch.tokens, batch, np.zeros_like(batch.tokens)), plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_a_token_moves_earlier_logits_only_if_it_is_in_the_prefix_of_their_document(name):
    cfg, one = DECODERS[name], np.ones((1, T), np.int32)
    place = np.arange(T)
    batch = tiny.packed_batch(0, rows=1)._replace(
        segment_ids=np.where(place < 9, 1, 2)[None].astype(np.int32),
        positions=np.where(place < 9, place, place - 9)[None].astype(np.int32),
    )
    prefix_BT = ((place < 4) | (place >= 9) & (place < 12)).astype(np.int32)[None]
    before = scoped(cfg, batch.tokens, batch, prefix_BT)
    for t in range(T):
        tokens_BT = np.where(place == t, (batch.tokens + 1) % tiny.VOCAB, batch.tokens)
        moved = (scoped(cfg, tokens_BT, batch, prefix_BT) != before).any(axis=-1)[0]
        document = batch.segment_ids[0] == batch.segment_ids[0, t]
        np.testing.assert_array_equal(moved, document & (one[0] * prefix_BT[0, t] | (place >= t)).astype(bool))


def test_the_loss_reads_the_prefix_of_its_batch():
    batch, model = tiny.packed_batch(5, rows=4), merge_model(*parts(DECODERS["gpt2"]))
    prefix_BT = (batch.positions < 3).astype(np.int32) * (batch.segment_ids > 0)
    plain, ours, told = jax.jit(
        lambda: [
            hidden_states(model, batch, None),
            hidden_states(model, batch._replace(prefix=prefix_BT), None),
            model.hidden(batch.tokens, batch.positions, MaskSpec(jnp.asarray(batch.segment_ids), prefix_BT)),
        ]
    )()
    np.testing.assert_array_equal(ours, told)
    assert (np.asarray(ours) != np.asarray(plain)).any()


def encoded(batch, seed=7):
    """The batch with rows of 12 tokens for an encoder, of the same documents."""
    rng, B = np.random.default_rng(seed), len(batch.tokens)
    segments = np.sort(rng.integers(1, batch.segment_ids.max() + 1, (B, 12), dtype=np.int32))
    return batch._replace(
        encoder=EncoderInput(rng.integers(0, tiny.VOCAB, (B, 12), dtype=np.int32), np.zeros_like(segments), segments)
    )


def test_every_logit_of_an_encoder_sees_its_whole_document_and_no_other():
    batch, cfg = tiny.packed_batch(5, rows=4), READERS["encoder"]
    before = scoped(cfg, batch.tokens, batch, None)
    for t in range(T):
        tokens_BT = batch.tokens.copy()
        tokens_BT[:, t] = (tokens_BT[:, t] + 1) % tiny.VOCAB
        moved = (scoped(cfg, tokens_BT, batch, None) != before).any(axis=-1)
        np.testing.assert_array_equal(moved, batch.segment_ids == batch.segment_ids[:, t : t + 1])


@pytest.mark.slow
def test_what_is_decoded_depends_on_its_own_document_of_the_encoder_and_on_its_past():
    batch, cfg = encoded(tiny.packed_batch(5, rows=4)), READERS["t5"]
    call = lambda tokens_BT, encoder: np.asarray(
        forward(cfg)(tokens_BT, batch.positions, batch.segment_ids, encoder=encoder)
    )
    before = call(batch.tokens, batch.encoder)
    for s in (0, 5, 11):
        tokens_BS = batch.encoder.tokens.copy()
        tokens_BS[:, s] = (tokens_BS[:, s] + 1) % tiny.VOCAB
        moved = (call(batch.tokens, batch.encoder._replace(tokens=tokens_BS)) != before).any(axis=-1)
        np.testing.assert_array_equal(moved, batch.segment_ids == batch.encoder.segment_ids[:, s : s + 1])
    for t in (0, 6, 15):
        tokens_BT = batch.tokens.copy()
        tokens_BT[:, t] = (tokens_BT[:, t] + 1) % tiny.VOCAB
        moved = (call(tokens_BT, batch.encoder) != before).any(axis=-1)
        later = (batch.segment_ids == batch.segment_ids[:, t : t + 1]) & (np.arange(T) >= t)[None]
        assert moved[:, t].all() and not (moved & ~later).any()  # what has no share of a softmax moves nothing


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", pytest.param("encoder", marks=pytest.mark.soak)])
def test_dropout_of_a_reader_acts_only_with_a_key(name):
    batch = tiny.packed_batch(1, rows=4)
    batch = encoded(batch) if name == "t5" else batch
    graphdef, params = parts(dataclasses.replace(READERS[name], dropout=0.3))
    states = jax.jit(lambda keys_B: hidden_states(merge_model(graphdef, params), batch, keys_B))
    dropped = [np.asarray(states(jax.random.split(jax.random.key(seed), 4))) for seed in (0, 1, 0)]
    np.testing.assert_array_equal(dropped[0], dropped[2])
    assert (dropped[0] != dropped[1]).any(axis=-1).all()
    plain, undropped = merge_model(parts(READERS[name])[0], params), merge_model(graphdef, params)
    same = jax.jit(lambda: [hidden_states(model, batch, None) for model in (plain, undropped)])()
    np.testing.assert_array_equal(*same)


def arrays(cfg):
    model = jax.eval_shape(lambda key: make_model(cfg, key=key), jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(split_model(model)[1]))


T5_SMALL = dict(vocab_size=32_128, num_layers=6, embed_dim=512, num_heads=8, head_dim=64, mlp_dim=2048, mlp="relu")
KNOWN = {
    "bert base": (
        EncoderConfig(
            vocab_size=30_522, num_layers=12, embed_dim=768, num_heads=12, mlp_dim=3072, num_token_types=2
        ),
        109_514_298,  # BertForMaskedLM: the tied table once, without the pooler
    ),
    "t5 small": (T5Config(**T5_SMALL, tied_embeddings=True), 60_506_624),
    "t5 1.1 small": (
        T5Config(**T5_SMALL | dict(num_layers=8, num_heads=6, mlp_dim=1024, mlp="gated_gelu")), 76_961_152,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_that_read_ahead_have_their_known_size(name):
    cfg, total = KNOWN[name]
    assert cfg.num_params == total == arrays(cfg)


@pytest.mark.parametrize(
    "cfg",
    [READERS["encoder"], READERS["t5"], *(dataclasses.replace(READERS["t5"], **changes) for changes in (
        {"mlp": "relu"}, {"tied_embeddings": True}, {"num_decoder_layers": None, "scan_layers": False})),
     dataclasses.replace(READERS["encoder"], num_token_types=0)],
)  # fmt: skip
def test_the_formulas_of_readers_count_the_arrays(cfg):
    assert cfg.num_params == arrays(cfg)


def test_flops_of_readers_are_those_counted_by_hand():
    # D=16 F=32 L=2 V=64 N=2 H=8; a row of 10, multiply-adds of one token in the forward pass
    block = 4 * 16 * 16 + 2 * 16 * 32 + 2 * 16 * 10  # a query sees all 10 keys
    assert READERS["encoder"].flops_per_token(10) == 6 * (2 * block + 16 * 16 + 16 * 64)
    # T5 with a gate, 2 blocks and 1, an encoder's row of 30
    attention, mlp = 4 * 16 * 16, 3 * 16 * 32
    encoder = 30 * 2 * (attention + mlp + 2 * 16 * 30)
    decoder = 10 * (attention + mlp + 2 * 16 * 10 / 2) + 10 * (2 * 16 * 16 + 2 * 16 * 30) + 30 * 2 * 16 * 16
    assert READERS["t5"].flops_per_token(10, 30) == 6 * (encoder + decoder + 10 * 16 * 64) / 10


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: EncoderConfig(**tiny.ENCODER | {"num_heads": 3}), "embed_dim=16 must be a multiple"),
        (lambda: EncoderConfig(**tiny.ENCODER | {"dropout": 1.0}), "dropout=1.0"),
        (lambda: T5Config(**tiny.T5 | {"num_buckets": 7}), "num_buckets=7"),
        (lambda: T5Config(**tiny.T5 | {"max_distance": 4}), "max_distance=4"),
        (lambda: T5Config(**tiny.T5 | {"num_decoder_layers": 0}), "num_decoder_layers=0"),
    ],
)
def test_readers_that_cannot_be_are_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()


@pytest.mark.slow
def test_t5_without_an_encoders_row_is_refused():
    batch = tiny.packed_batch(0, rows=1)
    with pytest.raises(AssertionError, match="T5 needs an encoder input"):
        logits(merge_model(*parts(READERS["t5"])), jnp.asarray(batch.tokens))
