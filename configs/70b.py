"""Llama-2 70B's layers (arXiv:2307.09288), 32,768 ids instead of 32,000: 68,989,231,104 parameters. Not measured.

    python -m jaxscale.main --config=configs/70b.py --config.data.files='shards/manifest.json'

Cost of the whole run at 40% MFU: 5.9e+23 FLOPs, 894,492 chip-hours of TPU v5p (459 TFLOP/s).
Preflight, remat full: peak memory per chip; minimum step time, exposed part; maximum MFU; sent
(2026-11-24, jax 0.12.0.1, libtpu 0.0.51)
    v5p:8x8x8: 16.6 GiB; 11.54 s, 1.74 s exposed; 66%; 493 GB
    4*v6e:16x16 (data=4): 12.4 GiB; 3.94 s, 1.49 s exposed; 48%; 314 + 1.6 GB DCN
    a100:32x8 (2 microbatches, tensor=8): 32.5 GiB; 31.73 s, 2.06 s exposed; 71%; 1,811 + 133.4 GB DCN
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = 4096, 1024 * 4096
    c.train_tokens = 1_380_000_000_000  # about 20 per parameter (arXiv:2203.15556)
    c.mesh = dict(fsdp=-1, tensor=4)
    c.model = dict(
        name="llama", vocab_size=32_768, num_layers=80, embed_dim=8192, num_heads=64,
        num_kv_heads=8, head_dim=128, mlp_dim=28672, remat="full",
    )  # fmt: skip
    c.optim = dict(peak_lr=1.5e-4, min_lr=1.5e-5, warmup_tokens="2000 steps")  # Llama 2's
    c.data = dict(name="tokens", files="shards/manifest.json")
    c.eval = dict(every_steps=500, num_rows=1024)
    c.checkpoint = dict(save_every_steps=500, keep_last=3, keep_every_steps=10_000)
    return c
