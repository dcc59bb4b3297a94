"""Llama-2 70B's shape (arXiv:2307.09288): 68,989,231,104 parameters. Measured: nothing yet.

    python -m jaxscale.main --config=configs/70b.py --config.data.files='shards/*.bin'

Cost of the whole run at 40% MFU: 5.9e+23 FLOPs, 894,492 chip-hours of TPU v5p (459 TFLOP/s).
Preflight: jaxscale preflight --config=configs/70b.py --topology='v5p:8x8x8'
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
