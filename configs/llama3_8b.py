"""Llama 3.1 8B (arXiv:2407.21783): 8,030,261,248 parameters. Not measured.

    jaxscale convert --from=Llama-3.1-8B --workdir=runs/llama3    # a folder with the model's files
    jaxscale prepare --input='raw/*.jsonl' --output=shards --config.tokenizer.name=runs/llama3/tokenizer/tokenizer.json
    python -m jaxscale.main --config=configs/llama3_8b.py --init_from=runs/llama3

Shape: config.json of meta-llama/Llama-3.1-8B.
Continued pretraining of one billion tokens at 40% MFU costs 78 chip-hours of TPU v5p (459 TFLOP/s).
Preflight, remat full: peak memory per chip; minimum step time, exposed part; maximum MFU; sent
(2026-11-24, jax 0.12.0.1, libtpu 0.0.51)
    v5p:2x2x2: 45.9 GiB; 9.82 s, 0.02 s exposed; 75%; 54 GB
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = 8192, 64 * 8192
    c.train_tokens = 1_000_000_000
    c.mesh = dict(fsdp=-1)
    c.model = dict(
        name="llama", vocab_size=128_256, num_layers=32, embed_dim=4096, num_heads=32,
        num_kv_heads=8, head_dim=128, mlp_dim=14_336, norm_eps=1e-5, rope_base=500_000.0,
        rope_scaling=dict(name="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192),
        remat="full",
    )  # fmt: skip
    c.optim = dict(peak_lr=2e-5, min_lr=2e-6, warmup_tokens="2%")  # for pretrained weights
    c.data = dict(name="tokens", files="shards/manifest.json")  # tokenized with the model's tokenizer
    c.eval = dict(every_steps=100, num_rows=256)
    c.checkpoint = dict(save_every_steps=100, keep_last=3)
    return c
