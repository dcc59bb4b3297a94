"""A small model for `jaxscale lab`: 1.4e5 parameters, trained on the bytes of Python's standard library.

    python -m jaxscale.main --config=configs/lab.py     # one run; `jaxscale lab rate` makes 80

Results may not transfer to large models: see docs/lab.md. Cost of one run: about 10 s on one core, including startup
and compilation (2026-11-25, jax 0.10.2).
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len = 128
    c.batch_tokens = 8 * 128
    c.train_tokens = 200_000
    c.model = dict(
        name="llama",
        vocab_size=264,
        num_layers=2,
        embed_dim=64,
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        mlp_dim=192,
        compute_dtype="float32",
    )
    c.optim = dict(peak_lr=4e-3, min_lr=2e-4, warmup_tokens="5%")
    c.data = dict(name="stdlib")
    c.eval = dict(every_steps=0, num_rows=128)
    c.checkpoint = dict(save_every_steps=0)
    c.sample = dict(num_tokens=0)
    c.monitor = dict(log_every_steps=1, statistics_every_steps=0, tensorboard=False)
    return c
