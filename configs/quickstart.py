"""A small Llama trained on the bytes of Python's standard library: 3.5e6 parameters.

    python -m jaxscale.main --config=configs/quickstart.py
    python -m jaxscale.main --config=configs/quickstart.py --config.train_tokens=2_000_000     # continues the run

Cost: 180 s on two AVX2 cores in float32, including compilation, for 2.24 bits per byte (AMD EPYC, jax 0.10.2,
2026-11-27); 90 s on two cores with AMX in bfloat16, which model.compute_dtype=auto selects there.
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len = 128
    c.batch_tokens = 8 * 128
    c.train_tokens = 316 * 8 * 128
    c.model = dict(
        name="llama",
        vocab_size=264,
        num_layers=4,
        embed_dim=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        mlp_dim=768,
    )
    # The best of about twenty runs; AdamW needed 1,000,000 tokens for 2.28 bits per byte: docs/lab.md.
    c.optim = dict(
        name="muon", muon_momentum=0.85, muon_dtype="auto", muon_steps=3,
        peak_lr=8e-3, min_lr=1e-4, warmup_tokens="5%",
    )  # fmt: skip
    c.data = dict(name="stdlib")
    c.eval = dict(every_steps=158, num_rows=256)
    c.checkpoint = dict(save_every_steps=100)
    c.sample = dict(num_tokens=120, prompt="def ", temperature=0.6)
    return c
