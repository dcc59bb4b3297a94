"""Kimi K2's shape (arXiv:2507.20534): 1,026,408,209,408 parameters, 32,861,477,888 active per token.
Not measured.

    python -m jaxscale.main --config=configs/kimi_k2.py --config.data.files='shards/manifest.json'

Shape: public ports of its config.json (MaxText's kimi-k2-1t.yml, NVIDIA's KimiK2Provider), which agree; the report
rounds it to 1.04T and 32.6B. Batch size, learning rate and tokens: section 2.5, with AdamW instead of MuonClip.
The released weights use YaRN; their conversion is not supported, because it was not verified.
Cost of the whole run at 40% MFU: 3.2e+24 FLOPs, 4,818,366 chip-hours of TPU v5p (459 TFLOP/s).
State in float32 (parameters, moments, gradients): 15,295 GiB over all chips.
Compiled for v5p:8x16x16, not timed (jax 0.12.0.1, libtpu 0.0.51, 2026-11-25): 82.4 GiB per chip;
minimum step time 40.6 s, 21.1 s exposed communication; maximum MFU 36%.
"""

import deepseek_v3


def get_config():
    c = deepseek_v3.get_config()
    c.batch_tokens, c.train_tokens = 16_384 * 4096, 15_500_000_000_000
    c.mesh, c.train.num_microbatches = dict(data=4, fsdp=-1, expert=8), 2  # for 2,048 chips
    c.model.update(vocab_size=163_840, num_heads=64, num_kv_heads=64, rope_base=50_000.0)
    c.model.experts = dict(
        number=384, chosen=8, mlp_dim=2048, shared_dim=2048, first_dense=1, score="sigmoid", scale=2.827, bias=True
    )
    c.optim.update(peak_lr=2e-4, min_lr=2e-5, decay_fraction=0.355, warmup_tokens="500 steps")  # 5.5 of 15.5T tokens
    return c
