"""Llama-2 13B's layers (arXiv:2307.09288), 32,768 ids instead of 32,000: 13,023,728,640 parameters. Not measured.

    python -m jaxscale.main --config=configs/13b.py --config.data.files='shards/manifest.json'

Cost of the whole run at 40% MFU: 2.1e+22 FLOPs, 32,322 chip-hours of TPU v5p (459 TFLOP/s).
Preflight, remat full: peak memory per chip; minimum step time, exposed part; maximum MFU; sent
(2026-11-24, jax 0.12.0.1, libtpu 0.0.51)
    v5p:8x8x8: 6.7 GiB; 2.07 s, 0.13 s exposed; 71%; 139 GB
    4*v6e:16x16 (data=4): 5.1 GiB; 0.70 s, 0.21 s exposed; 53%; 138 + 0.3 GB DCN
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = 4096, 1024 * 4096
    c.train_tokens = 260_000_000_000  # about 20 per parameter (arXiv:2203.15556)
    c.mesh = dict(fsdp=-1)
    c.model = dict(
        name="llama", vocab_size=32_768, num_layers=40, embed_dim=5120, num_heads=40,
        num_kv_heads=40, head_dim=128, mlp_dim=13824, remat="full",
    )  # fmt: skip
    c.optim = dict(peak_lr=3e-4, min_lr=3e-5, warmup_tokens="2000 steps")  # Llama 2's
    c.data = dict(name="tokens", files="shards/manifest.json")
    c.eval = dict(every_steps=500, num_rows=1024)
    c.checkpoint = dict(save_every_steps=500, keep_last=3, keep_every_steps=10_000)
    return c
