"""Writes the outside references for the parity tests: what torch and transformers compute for small random models.

    python -m venv torch-venv && torch-venv/bin/pip install torch transformers numpy
    torch-venv/bin/python tests/parity/make_references.py          # takes 10 seconds; writes *.npz beside this file

The tests read only the .npz files, so torch is needed by whoever changes this script and by nobody else. Each file has
`config` and `versions` (JSON text), and, unless said otherwise below:

    param/NAME   the weight under the name transformers gives it           tokens [2, 24] int32
    grad/NAME    d loss / d weight                                         logits [2, 24, 97]
    loss         mean next-token cross-entropy, float32[] [nats/token]: logits 0..22 predict tokens 1..23

    llama.npz           grouped queries (4 heads on 2), untied; also packed_logits: two documents in one row, each alone
    llama_capped.npz    the weights of llama.npz under a logit soft-cap and a z-loss (both plain torch, no weights kept)
    llama_training.npz  50 AdamW steps from the weights of llama.npz: lr, batches, losses, grad_norms, final_logits
    schedules.npz       learning rates of transformers' own schedules
"""

import json
import math
import pathlib

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import optimization

HERE = pathlib.Path(__file__).parent
VOCAB, EMBED, LAYERS, HEADS, MLP = 97, 32, 2, 4, 48
ROWS, LENGTH = 2, 24
VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}


def write(name, config, **arrays):
    """Saves one compressed .npz with its config and the versions that made it."""
    arrays = {key: value.detach().numpy() if torch.is_tensor(value) else value for key, value in arrays.items()}
    path = HERE / f"{name}.npz"
    np.savez_compressed(path, config=json.dumps(config), versions=json.dumps(VERSIONS), **arrays)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


def randomise(model, seed):
    """Weights for which every part of the model shows: scales around 1, biases around 0, both at a visible distance."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.3 * noise
        elif "embed" in name:
            value = 0.25 * noise
        else:
            value = noise / math.sqrt(EMBED)
        weight.data.copy_(value)


def next_token_loss(logits_BTV, tokens_BT):
    """Mean over the T-1 predicted tokens of each row [nats/token]."""
    return F.cross_entropy(logits_BTV[:, :-1].reshape(-1, logits_BTV.shape[-1]), tokens_BT[:, 1:].reshape(-1).long())


def random_tokens(seed):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32))


def weights(model):
    return {f"param/{name}": value.detach().clone() for name, value in model.named_parameters()}


def gradients(model):
    return {f"grad/{name}": value.grad.clone() for name, value in model.named_parameters()}


def reference(model, seed):
    """Everything the tests compare for one model: weights, tokens, logits, loss, gradients."""
    randomise(model, seed)
    tokens_BT = random_tokens(seed)
    model.zero_grad()
    logits_BTV = model(tokens_BT.long()).logits
    loss = next_token_loss(logits_BTV, tokens_BT)
    loss.backward()
    return {"tokens": tokens_BT, "logits": logits_BTV, "loss": loss, **weights(model), **gradients(model)}


def llama(**changes):
    """A transformers Llama; `changes` go over the common settings."""
    settings = dict(
        vocab_size=VOCAB, hidden_size=EMBED, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, tie_word_embeddings=False, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, attn_implementation="eager",
    ) | changes  # fmt: skip
    return settings, transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()


def write_llama():
    settings, model = llama()
    arrays = reference(model, seed=1)
    cut, tokens_BT = 10, arrays["tokens"].long()  # a packed row: positions restart and nothing is seen across the cut
    packed = torch.cat([model(tokens_BT[:, :cut]).logits, model(tokens_BT[:, cut:]).logits], dim=1)
    segment_ids = np.array([[1] * cut + [2] * (LENGTH - cut)] * ROWS, np.int32)
    positions = np.array([[*range(cut), *range(LENGTH - cut)]] * ROWS, np.int32)
    write("llama", settings, **arrays, packed_logits=packed, packed_segment_ids=segment_ids, packed_positions=positions)


def write_llama_capped(cap=3.0, z_loss=1e-2):
    """Soft-cap as in arXiv:2408.00118 section 2 (cap * tanh(logits / cap)), z-loss as in arXiv:2204.02311 section 5."""
    settings, model = llama()
    randomise(model, seed=1)
    tokens_BT = random_tokens(1)
    logits_BTV = cap * torch.tanh(model(tokens_BT.long()).logits / cap)
    cross_entropy = next_token_loss(logits_BTV, tokens_BT)
    z = z_loss * torch.logsumexp(logits_BTV[:, :-1], dim=-1).square().mean()
    (cross_entropy + z).backward()
    config = {**settings, "logit_soft_cap": cap, "z_loss": z_loss}
    write("llama_capped", config, logits=logits_BTV, loss=cross_entropy, z_term=z, **gradients(model))


def markov_batches(steps, rows, length, seed):
    """int32 [steps, rows, length + 1]: each token has one usual successor, taken 9 times in 10: much to learn."""
    rng = np.random.default_rng(seed)
    successor = rng.permutation(VOCAB)
    tokens = rng.integers(0, VOCAB, (steps, rows, length + 1), dtype=np.int32)
    usual = rng.random(tokens.shape) < 0.9
    for t in range(1, length + 1):
        tokens[..., t] = np.where(usual[..., t], successor[tokens[..., t - 1]], tokens[..., t])
    return tokens


def warmup_cosine(step, *, peak, low, warmup, steps):
    """Linear over `warmup` steps, the first of which is not 0, then half a cosine to `low` at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - 1 - warmup)))


def write_llama_training(steps=50, rows=4):
    settings, model = llama()
    randomise(model, seed=1)
    for name, weight in model.named_parameters():
        if "lm_head" in name:
            weight.data.mul_(0.3)  # a start near the uniform loss, from which 50 steps go somewhere
    config = dict(peak_lr=1e-2, min_lr=1e-3, warmup_steps=5, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1,
                  clip_norm=1.0, lm_head_scale=0.3)  # fmt: skip
    lr = [warmup_cosine(step, peak=1e-2, low=1e-3, warmup=5, steps=steps) for step in range(steps)]
    masked = [weight for name, weight in model.named_parameters() if weight.ndim < 2 or "embed_tokens" in name]
    decayed = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed_tokens" not in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": masked, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    batches = markov_batches(steps, rows, LENGTH, seed=5)
    losses, norms = [], []
    for step, tokens in enumerate(torch.from_numpy(batches)):
        for group in optimizer.param_groups:
            group["lr"] = lr[step]
        optimizer.zero_grad()
        logits_BTV = model(tokens[:, :-1].long()).logits
        loss = F.cross_entropy(logits_BTV.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1).long())
        loss.backward()
        # Before clipping. Torch clips by 1 / (norm + 1e-6), not 1 / norm: 1e-6 of the gradient, which Adam divides out.
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        losses.append(loss.detach())
        optimizer.step()
    arrays = {
        "lr": np.array(lr, np.float64),
        "batches": batches,
        "losses": torch.stack(losses),
        "grad_norms": torch.stack(norms),
        "final_logits": model(random_tokens(1).long()).logits,  # on the tokens of llama.npz
    }
    print("  losses", arrays["losses"][::7].tolist(), "norms", arrays["grad_norms"][::7].tolist())
    write("llama_training", {**settings, **config}, **arrays)


def write_schedules(peak=1.0, low=0.1, warmup=10, steps=100):
    """Learning rates for steps 0..steps of transformers' schedules, which start the warmup at 0."""

    def run(make):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
        schedule, values = make(optimizer), []
        for _ in range(steps + 1):
            values.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return np.array(values, np.float64)

    write(
        "schedules",
        dict(peak=peak, low=low, warmup=warmup, steps=steps),
        cosine=run(lambda o: optimization.get_cosine_with_min_lr_schedule_with_warmup(o, warmup, steps, min_lr=low)),
        cosine_to_zero=run(lambda o: optimization.get_cosine_schedule_with_warmup(o, warmup, steps)),
        linear=run(lambda o: optimization.get_linear_schedule_with_warmup(o, warmup, steps)),
        constant=run(lambda o: optimization.get_constant_schedule_with_warmup(o, warmup)),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    write_llama()
    write_llama_capped()
    write_llama_training()
    write_schedules()
