"""Llama-2 7B's shape (arXiv:2307.09288): 6,744,707,072 parameters. Measured: nothing yet.

    python -m jaxscale.main --config=configs/7b.py --config.data.files='shards/*.bin'

Cost of the whole run at 40% MFU: 5.8e+21 FLOPs, 8,759 chip-hours of TPU v5p (459 TFLOP/s).
Preflight, 2026-11-21 (jax 0.12.0, libtpu 0.0.51; GPUs jax 0.10.2), remat full:
    v5p:2x2x4 (16 microbatches): 15.7 GiB a chip; a step 32.19 s at least, MFU 76% at most; 819 GB sent
    v5p:8x8x16: 2.2 GiB a chip; a step 0.50 s at least, MFU 76% at most; 55 GB sent
    v5e:16x16: 7.2 GiB a chip; a step 4.69 s at least, MFU 76% at most; 53 GB sent
    v6e:8x8 (2 microbatches): 15.5 GiB a chip; a step 3.80 s at least, MFU 81% at most; 111 GB sent
    v6e:16x16: 7.3 GiB a chip; a step 0.95 s at least, MFU 81% at most; 53 GB sent
    h100:1x8 (32 microbatches): 32.1 GiB a chip; a step 31.47 s at least, MFU 72% at most; 1,496 GB sent
    h100:8x8 (4 microbatches): 15.5 GiB a chip; a step 3.93 s at least, MFU 72% at most; 104 + 106.0 GB DCN sent
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = 4096, 1024 * 4096
    c.train_tokens = 135_000_000_000  # about 20 a parameter (arXiv:2203.15556)
    c.mesh = dict(fsdp=-1)
    c.model = dict(
        name="llama", vocab_size=32_768, num_layers=32, embed_dim=4096, num_heads=32,
        num_kv_heads=32, head_dim=128, mlp_dim=11008, remat="full",
    )  # fmt: skip
    c.optim = dict(peak_lr=3e-4, min_lr=3e-5, warmup_tokens="2000 steps")  # Llama 2's
    c.data = dict(name="tokens", files="shards/*.bin")
    c.eval = dict(every_steps=500, num_rows=1024)
    c.checkpoint = dict(save_every_steps=500, keep_last=3, keep_every_steps=10_000)
    return c
