"""Llama-2 13B's shape (arXiv:2307.09288): 13,023,728,640 parameters. Measured: nothing yet.

    python -m jaxscale.main --config=configs/13b.py --config.data.files='shards/*.bin'

Cost of the whole run at 40% MFU: 2.1e+22 FLOPs, 32,322 chip-hours of TPU v5p (459 TFLOP/s).
Preflight: jaxscale preflight --config=configs/13b.py --topology='v5p:8x8x8'
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = 4096, 1024 * 4096
    c.train_tokens = 260_000_000_000  # about 20 a parameter (arXiv:2203.15556)
    c.mesh = dict(fsdp=-1)
    c.model = dict(
        name="llama", vocab_size=32_768, num_layers=40, embed_dim=5120, num_heads=40,
        num_kv_heads=40, head_dim=128, mlp_dim=13824, remat="full",
    )  # fmt: skip
    c.optim = dict(peak_lr=3e-4, min_lr=3e-5, warmup_tokens="2000 steps")  # Llama 2's
    c.data = dict(name="tokens", files="shards/*.bin")
    c.eval = dict(every_steps=500, num_rows=1024)
    c.checkpoint = dict(save_every_steps=500, keep_last=3, keep_every_steps=10_000)
    return c
