"""A 1.1B Llama in TinyLlama's shape (arXiv:2401.02385), heads of 128: 1,126,262,784 parameters.
Measured on an H200 (jax 0.11.2, 2026-11-27): 8 rows, remat none, 57,880 and 59,379 tokens/s, 43.6% and 44.8% MFU.

    python -m jaxscale.main --config=configs/1b.py --config.data.files='shards/manifest.json'

Cost of the whole run at 40% MFU: 1.6e+20 FLOPs, 248 chip-hours of TPU v5p (459 TFLOP/s).
Preflight, remat full: peak memory per chip; minimum step time, exposed part; maximum MFU; sent
(2026-11-24, jax 0.12.0.1, libtpu 0.0.51)
    v5e:4x4 (8 microbatches): 4.0 GiB; 7.46 s, 0.70 s exposed; 67%; 66 GB
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = 4096, 512 * 4096
    c.train_tokens = 22_000_000_000  # about 20 per parameter (arXiv:2203.15556)
    c.mesh = dict(fsdp=-1)
    c.model = dict(
        name="llama", vocab_size=32_768, num_layers=22, embed_dim=2048, num_heads=16,
        num_kv_heads=4, head_dim=128, mlp_dim=5632, remat="full",
    )  # fmt: skip
    c.optim = dict(peak_lr=4e-4, min_lr=4e-5, warmup_tokens="1000 steps")  # TinyLlama's rates
    c.data = dict(name="tokens", files="shards/manifest.json")
    c.eval = dict(every_steps=500, num_rows=1024)
    c.checkpoint = dict(save_every_steps=500, keep_last=3, keep_every_steps=10_000)
    return c
