"""Our encoder and encoder-decoder compute what transformers' BERT and T5 compute.

B batch  T position  S position of the encoder's row  D embed  N heads  H head dim
"""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxscale.core.batch import Batch, EncoderInput
from jaxscale.core.models.gpt2_bert_t5_config import EncoderConfig, T5Config
from jaxscale.core.models.layers import merge_model, split_model
from jaxscale.core.models.model import logits, make_model, summed_loss, token_losses
from jaxscale.core.models.t5 import relative_buckets

# float32 sums taken in another order; see test_llama.py. T5 scales no scores, so its softmax is sharper.
TOLERANCE, GRADIENT_TOLERANCE = 2e-5, 4e-6


def stacked(cfg, blocks):
    if not cfg.scan_layers:
        return {str(layer): params for layer, params in enumerate(blocks)}
    return jax.tree.map(lambda *layers: np.stack(layers), *blocks)


def bert_config(hf, **changes):
    settings = {
        "vocab_size": hf["vocab_size"],
        "num_layers": hf["num_hidden_layers"],
        "embed_dim": hf["hidden_size"],
        "num_heads": hf["num_attention_heads"],
        "mlp_dim": hf["intermediate_size"],
        "max_seq_len": hf["max_position_embeddings"],
        "num_token_types": hf["type_vocab_size"],
        "norm_eps": hf["layer_norm_eps"],
        "compute_dtype": "float32",
    }
    return EncoderConfig(**settings | changes)


def bert_params(cfg, arrays):
    """Our nested dict for {name of transformers: weight}; its linear layers are [out, in]."""
    D, N = cfg.embed_dim, cfg.num_heads
    H = D // N

    def block(layer):
        get = lambda name: arrays[f"bert.encoder.layer.{layer}.{name}"]
        attention = {"wo": get("attention.output.dense.weight").T.reshape(N, H, D)}
        attention["bias_o"] = get("attention.output.dense.bias")
        for name in ("query", "key", "value"):
            attention[f"w{name[0]}"] = get(f"attention.self.{name}.weight").T.reshape(D, N, H)
            attention[f"bias_{name[0]}"] = get(f"attention.self.{name}.bias").reshape(N, H)
        return {
            "attention": attention,
            "scale_attention": get("attention.output.LayerNorm.weight"),
            "bias_attention": get("attention.output.LayerNorm.bias"),
            "mlp": {
                "up": get("intermediate.dense.weight").T,
                "bias_up": get("intermediate.dense.bias"),
                "down": get("output.dense.weight").T,
                "bias_down": get("output.dense.bias"),
            },
            "scale_mlp": get("output.LayerNorm.weight"),
            "bias_mlp": get("output.LayerNorm.bias"),
        }

    table, head = (lambda name: arrays[f"bert.embeddings.{name}"]), "cls.predictions.transform."
    return {
        "embedding": table("word_embeddings.weight"),
        "position_embedding": table("position_embeddings.weight"),
        "type_embedding": table("token_type_embeddings.weight"),
        "scale_embedding": table("LayerNorm.weight"),
        "bias_embedding": table("LayerNorm.bias"),
        "blocks": stacked(cfg, [block(layer) for layer in range(cfg.num_layers)]),
        "head": {
            "dense": arrays[head + "dense.weight"].T,
            "bias_dense": arrays[head + "dense.bias"],
            "scale": arrays[head + "LayerNorm.weight"],
            "bias": arrays[head + "LayerNorm.bias"],
        },
        "bias_vocab": arrays["cls.predictions.bias"],
    }


def t5_config(hf, **changes):
    settings = {
        "vocab_size": hf["vocab_size"],
        "num_layers": hf["num_layers"],
        "num_decoder_layers": hf["num_decoder_layers"],
        "embed_dim": hf["d_model"],
        "num_heads": hf["num_heads"],
        "head_dim": hf["d_kv"],
        "mlp_dim": hf["d_ff"],
        "mlp": {"relu": "relu", "gated-gelu": "gated_gelu"}[hf["feed_forward_proj"]],
        "tied_embeddings": hf["tie_word_embeddings"],
        "num_buckets": hf["relative_attention_num_buckets"],
        "max_distance": hf["relative_attention_max_distance"],
        "norm_eps": hf["layer_norm_epsilon"],
        "compute_dtype": "float32",
    }
    return T5Config(**settings | changes)


def t5_params(cfg, arrays):
    """As bert_params."""
    D, N, H = cfg.embed_dim, cfg.num_heads, cfg.head_dim

    def block(stack, layer):
        get = lambda name: arrays[f"{stack}.block.{layer}.layer.{name}.weight"]

        def attention(name):
            projections = {f"w{one}": get(f"{name}.{one}").T.reshape(D, N, H) for one in "qkv"}
            return projections | {"wo": get(f"{name}.o").T.reshape(N, H, D)}

        mlp = 1 if stack == "encoder" else 2
        products = {"gate": "wi_0", "up": "wi_1"} if cfg.mlp == "gated_gelu" else {"up": "wi"}
        products |= {"down": "wo"}
        params = {
            "attention_norm": get("0.layer_norm"),
            "attention": attention("0.SelfAttention"),
            "mlp_norm": get(f"{mlp}.layer_norm"),
            "mlp": {ours: get(f"{mlp}.DenseReluDense.{theirs}").T for ours, theirs in products.items()},
        }
        if stack == "decoder":
            params |= {"across_norm": get("1.layer_norm"), "across": attention("1.EncDecAttention")}
        return params

    params = {"embedding": arrays["shared.weight"]}
    for stack, layers in (("encoder", cfg.num_layers), ("decoder", cfg.decoder_layers)):
        params |= {
            f"{stack}_bias": arrays[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"],
            f"{stack}_blocks": stacked(cfg, [block(stack, layer) for layer in range(layers)]),
            f"{stack}_norm": arrays[f"{stack}.final_layer_norm.weight"],
        }
    return params if cfg.tied_embeddings else params | {"head": arrays["lm_head.weight"].T}


def places(segments_BT):
    """Positions that restart where a segment does."""
    T = segments_BT.shape[1]
    starts = np.where(np.diff(segments_BT, axis=1, prepend=-1) != 0, np.arange(T), 0)
    return (np.arange(T) - np.maximum.accumulate(starts, axis=1)).astype(np.int32)


def cut_at(place, shape):
    """Segments of rows of two documents, the second from `place` on."""
    return np.broadcast_to(np.where(np.arange(shape[1]) < place, 1, 2).astype(np.int32), shape)


def bert_batch(reference, segments_BT):
    return Batch(reference["tokens"], reference["targets"], places(segments_BT), segments_BT, reference["weights"])


def t5_batch(reference, segments_BT, segments_BS):
    targets_BT = reference["targets"]
    tokens_BT = np.roll(targets_BT, 1, axis=1)
    tokens_BT[places(segments_BT) == 0] = 0  # what T5's decoder reads first
    encoder = EncoderInput(reference["tokens"], places(segments_BS), segments_BS)
    return Batch(tokens_BT, targets_BT, places(segments_BT), segments_BT, reference["weights"], encoder=encoder)


def graph_of(cfg, params):
    """The model's graphdef; its parameters must have the names and shapes of these."""
    make = lambda key: make_model(cfg, key=key)
    graphdef, own, _ = split_model(jax.eval_shape(make, jax.random.key(0)))
    assert jax.tree.map(np.shape, own) == jax.tree.map(np.shape, params)
    return graphdef


def all_logits(model, batch):
    more = {} if batch.encoder is None else {"encoder": batch.encoder}
    return logits(model, batch.tokens, batch.positions, batch.segment_ids, **more)


def read(cfg, params, batch):
    graphdef = graph_of(cfg, params)
    return jax.jit(lambda params, batch: all_logits(merge_model(graphdef, params), batch))(params, batch)


class Computed(NamedTuple):
    logits: Any
    loss: Any
    token_losses: Any
    gradients: Any


def compute(cfg, params, batch):
    """Losses and gradients are means over the weighted tokens."""
    graphdef = graph_of(cfg, params)

    def objective(params, batch):
        model, tokens = merge_model(graphdef, params), batch.weights.sum()
        nats = (token_losses(model, batch) * batch.weights).sum() / tokens
        return summed_loss(model, batch, None, {})[0] / tokens, (all_logits(model, batch), nats)

    (loss, (every, nats)), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(params, batch)
    return Computed(every, loss, nats, gradients)


IN_CHUNKS = {"scan_layers": False, "loss_chunk_tokens": 16}


@pytest.mark.slow
def test_logits_loss_and_gradients_are_those_of_bert(parity):
    reference = parity.load("bert")
    cfg = bert_config(reference.config, loss_chunk_tokens=16)
    ours = compute(cfg, bert_params(cfg, reference.weights), bert_batch(reference, reference["real"]))
    real = reference["real"] > 0  # what stands at padding nobody reads
    np.testing.assert_allclose(ours.logits[real], reference["logits"][real], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose([ours.loss, ours.token_losses], [reference["loss"]] * 2, rtol=1e-6)
    parity.assert_close_trees(ours.gradients, bert_params(cfg, reference.gradients), GRADIENT_TOLERANCE)


def test_packed_documents_are_read_as_bert_reads_each_alone(parity):
    reference = parity.load("bert")
    cfg = bert_config(reference.config)
    batch = bert_batch(reference, cut_at(int(reference["cut"]), reference["tokens"].shape))
    ours = read(cfg, bert_params(cfg, reference.weights), batch)
    np.testing.assert_allclose(ours, reference["packed_logits"], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("t5_v1_1", {}),
        pytest.param("t5_v1_0", IN_CHUNKS, marks=pytest.mark.soak),
        pytest.param("t5_v1_1", {"remat": "full"}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_logits_loss_and_gradients_are_those_of_t5(name, form, parity):
    reference = parity.load(name)
    cfg = t5_config(reference.config, **form)
    batch = t5_batch(reference, np.ones(reference["targets"].shape, np.int32), reference["real"])
    ours = compute(cfg, t5_params(cfg, reference.weights), batch)
    np.testing.assert_allclose(ours.logits, reference["logits"], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose([ours.loss, ours.token_losses], [reference["loss"]] * 2, rtol=1e-6)
    parity.assert_close_trees(ours.gradients, t5_params(cfg, reference.gradients), GRADIENT_TOLERANCE)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["t5_v1_0", "t5_v1_1"])
def test_packed_documents_are_read_as_t5_reads_each_alone(name, parity):
    reference = parity.load(name)
    cfg = t5_config(reference.config)
    segments_BT = cut_at(int(reference["target_cut"]), reference["targets"].shape)
    batch = t5_batch(reference, segments_BT, cut_at(int(reference["cut"]), reference["tokens"].shape))
    ours = read(cfg, t5_params(cfg, reference.weights), batch)
    np.testing.assert_allclose(ours, reference["packed_logits"], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("direction", ["both", "one"])
def test_relative_positions_have_the_buckets_of_t5(direction, parity):
    reference = parity.load("t5_buckets")
    most, num_buckets, max_distance = (reference.config[key] for key in ("most", "num_buckets", "max_distance"))
    ours = relative_buckets(2 * most + 1, num_buckets, max_distance, direction == "both")
    np.testing.assert_array_equal(ours[most], reference[direction])  # seen from the middle: -most to most
