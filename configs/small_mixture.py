"""A small mixture on the source of Python's standard library, byte by byte, and a dense model of equal FLOPs a token.

    python -m jaxscale.main --config=configs/small_mixture.py:experts    # 888,000 parameters; a token has 299,000
    python -m jaxscale.main --config=configs/small_mixture.py:dense      # 297,000

8 experts of which a token has 2, each half as wide as the dense MLP; the same 2,000,000 tokens in the same order.
Measured: nothing yet. It is for two cores and some minutes.
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
    c.optim = dict(peak_lr=8e-3, min_lr=4e-4, warmup_tokens="5%")
    c.data = dict(name="stdlib")
    c.eval = dict(every_steps=0, num_rows=1024)
    c.checkpoint = dict(save_every_steps=0)
    return c
