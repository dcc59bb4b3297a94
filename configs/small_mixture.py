"""A small mixture of experts on the bytes of Python's standard library, and a dense model with equal FLOPs per token.

    python -m jaxscale.main --config=configs/small_mixture.py:experts    # 888,000 parameters, 299,000 active
    python -m jaxscale.main --config=configs/small_mixture.py:dense      # 297,000

There are 8 experts, 2 per token, each half as wide as the dense MLP. Both models train on 2,000,000 tokens in the same
order. Validation bits per byte by seed (2 cores, jax 0.10.2, 2026-11-24):

    seed                     0      1      2
    experts, lr 4e-3     2.092  2.119  2.117
    dense, lr 8e-3       2.147  2.165  2.137

The means are 2.109 and 2.150, a difference of 0.04; seeds differ by up to 0.03. Learning rates are the best of 4e-3,
8e-3 and 16e-3 with seed 0 (experts 2.092, 2.108, 2.251, and 2.180 at 2e-3; dense 2.150, 2.147, 2.177). The
router starts from random weights. After the first tenth of the steps, the busiest expert has 1.37 to 1.45 times the
mean load of its layer (worst layer of each step, averaged over steps). A run takes minutes on two cores.
"""

import ml_collections


def get_config(arg="experts"):
    if arg not in ("experts", "dense"):
        raise TypeError(f"the argument is {arg!r}; write experts or dense")
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens, c.train_tokens = 128, 16 * 128, 2_000_000
    c.model = dict(
        name="llama", vocab_size=264, num_layers=4, embed_dim=64, num_heads=2, num_kv_heads=2, head_dim=32,
        mlp_dim=256, compute_dtype="float32",
    )  # fmt: skip
    if arg == "experts":
        c.model.experts = dict(number=8, chosen=2, mlp_dim=128, bias=True)  # 2 x 128 = 256
    c.optim = dict(peak_lr=8e-3 if arg == "dense" else 4e-3, min_lr=4e-4, warmup_tokens="5%")
    c.data = dict(name="stdlib")
    c.eval = dict(every_steps=0, num_rows=1024)
    c.checkpoint = dict(save_every_steps=0)
    return c
