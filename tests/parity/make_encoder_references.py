"""Writes the outside references for the models that read in both directions: transformers' BERT and T5.

    torch-venv/bin/python tests/parity/make_encoder_references.py    # the environment of make_references.py; 5 seconds

As there, each file has `config`, `versions`, param/NAME, grad/NAME, `tokens`, `logits` and `loss`, and beside them:

    bert.npz         tokens [2, 24] with some hidden, targets, weights (1: a target), real (0: padding, which is not
                     read); loss over the targets; packed_logits: two documents in each row, each alone
    t5_v1_0.npz      ReLU, one table. tokens [2, 24] and real are the encoder's, targets [2, 14] the decoder's;
    t5_v1_1.npz      gated GELU, an output projection. packed_logits as for bert, both rows cut in two
    t5_buckets.npz   buckets of relative positions from -300 to 300, in both directions and in one
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from make_references import EMBED, HEADS, LAYERS, LENGTH, MLP, ROWS, VOCAB, gradients, weights, write
from transformers.models.t5.modeling_t5 import T5Attention

PADDING = 5  # at the end of the second row
TARGETS = 14
CUT, TARGET_CUT = 10, 6  # where a packed row's second document begins


def randomise(model, seed):
    """Weights for which every part shows: scales around 1, biases around 0, both at a visible distance."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name.lower():
            value = 1 + 0.3 * noise if name.endswith("weight") else 0.3 * noise
        elif weight.ndim == 1 or "relative_attention_bias" in name:
            value = 0.3 * noise
        elif "embeddings" in name or "shared" in name:
            value = 0.25 * noise
        else:
            value = noise / math.sqrt(EMBED)
        weight.data.copy_(value)


def random_ids(seed, length):
    return torch.from_numpy(np.random.default_rng(seed).integers(3, VOCAB, (ROWS, length)))


def real_tokens():
    real_BT = torch.ones((ROWS, LENGTH), dtype=torch.long)
    real_BT[-1, -PADDING:] = 0
    return real_BT


def loss_of(logits_BTV, targets_BT, weights_BT):
    nats = F.cross_entropy(logits_BTV.reshape(-1, VOCAB), targets_BT.reshape(-1), reduction="none")
    return (nats * weights_BT.reshape(-1)).sum() / weights_BT.sum()


def write_bert(seed=6):
    settings = dict(
        vocab_size=VOCAB, hidden_size=EMBED, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=MLP,
        max_position_embeddings=32, type_vocab_size=2, hidden_act="gelu", layer_norm_eps=1e-12, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BertForMaskedLM(transformers.BertConfig(**settings)).eval()
    randomise(model, seed)
    targets_BT, real_BT = random_ids(seed, LENGTH), real_tokens()
    chosen_BT = torch.from_numpy(np.random.default_rng(seed + 1).random((ROWS, LENGTH)) < 0.2) & (real_BT > 0)
    tokens_BT = torch.where(chosen_BT, 2, targets_BT)  # 2 is the mask
    model.zero_grad()
    logits_BTV = model(input_ids=tokens_BT, attention_mask=real_BT).logits
    loss = model(input_ids=tokens_BT, attention_mask=real_BT, labels=targets_BT.masked_fill(~chosen_BT, -100)).loss
    loss.backward()
    parts = [model(input_ids=part).logits for part in (tokens_BT[:, :CUT], tokens_BT[:, CUT:])]
    write(
        "bert", settings, tokens=tokens_BT.int(), targets=targets_BT.int(), weights=chosen_BT.float(),
        real=real_BT.int(), logits=logits_BTV, loss=loss, packed_logits=torch.cat(parts, dim=1), cut=np.array(CUT),
        **weights(model), **gradients(model),
    )  # fmt: skip


def write_t5(name, seed, **changes):
    settings = dict(
        vocab_size=VOCAB, d_model=EMBED, d_kv=6, d_ff=MLP, num_layers=LAYERS, num_decoder_layers=LAYERS + 1,
        num_heads=HEADS, relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=0.0,
        layer_norm_epsilon=1e-6, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    ) | changes  # fmt: skip
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**settings)).eval()
    if not settings["tie_word_embeddings"]:  # transformers 5 shares the table all the same; T5 1.1 does not
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    randomise(model, seed)
    tokens_BS, targets_BT, real_BS = random_ids(seed, LENGTH), random_ids(seed + 1, TARGETS), real_tokens()
    weights_BT = torch.ones((ROWS, TARGETS))
    weights_BT[0, -3:] = 0
    model.zero_grad()
    shifted = lambda targets: torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], dim=1)
    logits_BTV = model(input_ids=tokens_BS, attention_mask=real_BS, decoder_input_ids=shifted(targets_BT)).logits
    loss = loss_of(logits_BTV, targets_BT, weights_BT)
    labels_BT = targets_BT.masked_fill(weights_BT == 0, -100)
    theirs = model(input_ids=tokens_BS, attention_mask=real_BS, decoder_input_ids=shifted(targets_BT), labels=labels_BT)
    torch.testing.assert_close(loss, theirs.loss)
    loss.backward()
    parts = [
        model(input_ids=inputs, decoder_input_ids=shifted(targets)).logits
        for inputs, targets in (
            (tokens_BS[:, :CUT], targets_BT[:, :TARGET_CUT]),
            (tokens_BS[:, CUT:], targets_BT[:, TARGET_CUT:]),
        )
    ]
    write(
        name, settings, tokens=tokens_BS.int(), real=real_BS.int(), targets=targets_BT.int(), weights=weights_BT,
        logits=logits_BTV, loss=loss, packed_logits=torch.cat(parts, dim=1), cut=np.array(CUT),
        target_cut=np.array(TARGET_CUT), **weights(model), **gradients(model),
    )  # fmt: skip


def write_t5_buckets(most=300, num_buckets=32, max_distance=128):
    ahead = torch.arange(-most, most + 1)
    bucket = lambda bidirectional: T5Attention._relative_position_bucket(
        ahead, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    config = dict(most=most, num_buckets=num_buckets, max_distance=max_distance)
    write("t5_buckets", config, both=bucket(True).int(), one=bucket(False).int())


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    write_bert()
    write_t5("t5_v1_0", seed=8, feed_forward_proj="relu", tie_word_embeddings=True)
    write_t5("t5_v1_1", seed=10, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    write_t5_buckets()
