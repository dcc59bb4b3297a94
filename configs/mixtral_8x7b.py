"""Mixtral 8x7B (arXiv:2401.04088): 46,702,792,704 parameters, 12,879,925,248 active per token.
Measured on one H200 (jax 0.11.2, 2026-11-26): three layers, 8 rows, remat minimal, MFU 49.3%.

    jaxscale convert --from=Mixtral-8x7B-v0.1 --workdir=runs/mixtral    # a folder with the model's files
    python -m jaxscale.main --config=configs/mixtral_8x7b.py --init_from=runs/mixtral

Shape: config.json of mistralai/Mixtral-8x7B-v0.1.
Continued pretraining of one billion tokens at 40% MFU costs 121 chip-hours of TPU v5p (459 TFLOP/s).
docs/explanation/mixtures.md has the preflight result for v5p:4x4x4.
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = 4096, 256 * 4096
    c.train_tokens = 1_000_000_000
    c.mesh = dict(fsdp=-1)
    c.model = dict(
        name="llama", vocab_size=32_000, num_layers=32, embed_dim=4096, num_heads=32,
        num_kv_heads=8, head_dim=128, mlp_dim=14_336, norm_eps=1e-5, rope_base=1_000_000.0,
        experts=dict(number=8, chosen=2, mlp_dim=14_336),
        remat="full",
    )  # fmt: skip
    c.train = dict(aux_losses=dict(balance_loss=0.02), reduce_dtype="bfloat16")
    c.optim = dict(peak_lr=1e-5, min_lr=1e-6, warmup_tokens="2%")  # for pretrained weights
    c.data = dict(name="tokens", files="shards/manifest.json")  # tokenized with the model's tokenizer
    c.eval = dict(every_steps=100, num_rows=256)
    c.checkpoint = dict(save_every_steps=100, keep_last=3)
    return c
