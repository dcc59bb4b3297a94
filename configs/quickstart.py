"""A small Llama on the source of Python's standard library, byte by byte: 3.5e6 parameters.

    python -m jaxscale.main --config=configs/quickstart.py
    python -m jaxscale.main --config=configs/quickstart.py --config.train_tokens=2_000_000     # later: goes on

Cost: 117 s on two cores, compilation included, to 2.30 bits per byte (2026-11-20, jax 0.10.2, 10,000 tokens/s).
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len = 256
    c.batch_tokens = 8 * 256
    c.train_tokens = 1_000_000
    c.train = dict(num_microbatches=2)  # passes of 1,024 tokens
    c.model = dict(
        name="llama",
        vocab_size=264,
        num_layers=4,
        embed_dim=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        mlp_dim=768,
        compute_dtype="float32",
    )
    c.optim = dict(peak_lr=2e-3, min_lr=1e-4, warmup_tokens="5%")
    c.data = dict(name="stdlib")
    c.eval = dict(every_steps=100, num_rows=128)
    c.checkpoint = dict(save_every_steps=100)
    c.sample = dict(num_tokens=300, prompt="def ", temperature=0.6)
    return c
