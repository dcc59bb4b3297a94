"""Llama-2 7B's layers (arXiv:2307.09288) with 32,768 ids instead of 32,000: 6,744,707,072 parameters. Not measured.

    python -m jaxscale.main --config=configs/7b.py --config.data.files='shards/manifest.json'

Cost of the whole run at 40% MFU: 5.8e+21 FLOPs, 8,759 chip-hours of TPU v5p (459 TFLOP/s).
Preflight, remat full: peak memory per chip; minimum step time, exposed part; maximum MFU; sent
(2026-11-24, jax 0.12.0.1, libtpu 0.0.51)
    v5p:2x2x4 (16 microbatches): 17.3 GiB; 32.87 s, 0.14 s exposed; 75%; 794 GB
    v5p:8x8x16: 3.3 GiB; 0.58 s, 0.07 s exposed; 65%; 72 GB
    v5e:16x16: 7.2 GiB; 5.00 s, 0.30 s exposed; 71%; 53 GB
    v6e:8x8 (2 microbatches): 17.3 GiB; 4.14 s, 0.05 s exposed; 74%; 105 GB
    v6e:16x16: 7.8 GiB; 1.12 s, 0.10 s exposed; 68%; 70 GB
    tpu7x:2x2x4: 59.7 GiB; 6.66 s, 0.23 s exposed; 73%; 52 GB
    h100:1x8 (32 microbatches): 25.7 GiB; 29.44 s, 0.53 s exposed; 77%; 1,496 GB
    h100:8x8 (4 microbatches): 11.1 GiB; 3.63 s, 0.02 s exposed; 78%; 187 + 23.4 GB DCN
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = 4096, 1024 * 4096
    c.train_tokens = 135_000_000_000  # about 20 per parameter (arXiv:2203.15556)
    c.mesh = dict(fsdp=-1)
    c.model = dict(
        name="llama", vocab_size=32_768, num_layers=32, embed_dim=4096, num_heads=32,
        num_kv_heads=32, head_dim=128, mlp_dim=11008, remat="full",
    )  # fmt: skip
    c.optim = dict(peak_lr=3e-4, min_lr=3e-5, warmup_tokens="2000 steps")  # Llama 2's
    c.data = dict(name="tokens", files="shards/manifest.json")
    c.eval = dict(every_steps=500, num_rows=1024)
    c.checkpoint = dict(save_every_steps=500, keep_last=3, keep_every_steps=10_000)
    return c
