"""Llama-2 70B's shape (arXiv:2307.09288): 68,989,231,104 parameters. Measured: nothing yet.

    python -m jaxscale.main --config=configs/70b.py --config.data.files='shards/*.bin'

Cost of the whole run at 40% MFU: 5.9e+23 FLOPs, 894,492 chip-hours of TPU v5p (459 TFLOP/s).
Preflight, 2026-11-21 (jax 0.12.0, libtpu 0.0.51; GPUs jax 0.10.2), remat full:
    v5p:8x8x8: 16.9 GiB a chip; a step 9.72 s at least, MFU 79% at most; 496 GB sent
    4*v6e:16x16 (data=4): 12.1 GiB a chip; a step 2.36 s at least, MFU 81% at most; 318 + 1.6 GB DCN sent
    a100:32x8 (2 parts, tensor=8): 39.5 GiB a chip; a step 31.21 s at least, MFU 72% at most; 1,811 + 133.4 GB DCN sent
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = 4096, 1024 * 4096
    c.train_tokens = 1_380_000_000_000  # about 20 a parameter (arXiv:2203.15556)
    c.mesh = dict(fsdp=-1, tensor=4)
    c.model = dict(
        name="llama", vocab_size=32_768, num_layers=80, embed_dim=8192, num_heads=64,
        num_kv_heads=8, head_dim=128, mlp_dim=28672, remat="full",
    )  # fmt: skip
    c.optim = dict(peak_lr=1.5e-4, min_lr=1.5e-5, warmup_tokens="2000 steps")  # Llama 2's
    c.data = dict(name="tokens", files="shards/*.bin")
    c.eval = dict(every_steps=500, num_rows=1024)
    c.checkpoint = dict(save_every_steps=500, keep_last=3, keep_every_steps=10_000)
    return c
