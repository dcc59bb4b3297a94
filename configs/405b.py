"""Llama 3.1 405B's shape (arXiv:2407.21783, table 3): 405,853,388,800 parameters. Not measured.

    python -m jaxscale.main --config=configs/405b.py --config.data.files='shards/manifest.json' \\
        --config.mesh.pipeline=8 --config.train.num_microbatches=64

Cost of the whole run at 40% MFU: 3.9e+25 FLOPs, 59,570,494 chip-hours of TPU v5p (459 TFLOP/s).
State in float32 (parameters, moments, gradients): 6,048 GiB over all chips.
Compiled for v5p:8x8x16 with these flags, not timed (jax 0.12.0.1, libtpu 0.0.51, 2026-11-24): 60.9 GiB per
chip, bubble 9.9%, maximum MFU 64%. Estimated by plan only: h100:2048x8 with mesh.pipeline=16, 16 microbatches and
pipeline.chunks=2 has a bubble of 31.9% and a maximum MFU of 39%.
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = 8192, 2048 * 8192  # 16.8e6: the final, largest batch of the paper
    c.train_tokens = 15_600_000_000_000
    c.mesh = dict(fsdp=-1, tensor=8)
    c.model = dict(
        name="llama", vocab_size=128_256, num_layers=126, embed_dim=16_384, num_heads=128,
        num_kv_heads=8, head_dim=128, mlp_dim=53_248, norm_eps=1e-5, rope_base=500_000.0, remat="full",
    )  # fmt: skip
    c.optim = dict(peak_lr=8e-5, min_lr=8e-7, warmup_tokens="8000 steps")  # the paper's
    c.data = dict(name="tokens", files="shards/manifest.json")
    c.eval = dict(every_steps=1000, num_rows=2048)
    c.checkpoint = dict(save_every_steps=250, keep_last=3, keep_every_steps=10_000)
    return c
