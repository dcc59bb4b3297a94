"""Qwen3 8B (arXiv:2505.09388): 8,190,735,360 parameters. Not measured.

    jaxscale convert --from=Qwen3-8B-Base --workdir=runs/qwen3    # a folder with the model's files
    jaxscale prepare --input='raw/*.jsonl' --output=shards --config.tokenizer.name=runs/qwen3/tokenizer/tokenizer.json
    python -m jaxscale.main --config=configs/qwen3_8b.py --init_from=runs/qwen3

Shape: config.json of Qwen/Qwen3-8B. Other settings are those of llama3_8b.py.
Continued pretraining of one billion tokens at 40% MFU costs 80 chip-hours of TPU v5p (459 TFLOP/s).
Preflight, remat full: peak memory per chip; minimum step time, exposed part; maximum MFU; sent
(2026-11-24, jax 0.12.0.1, libtpu 0.0.51)
    v5p:2x2x2: 47.6 GiB; 10.12 s, 0.02 s exposed; 74%; 55 GB
"""

import llama3_8b


def get_config():
    c = llama3_8b.get_config()
    c.model = dict(
        name="llama", vocab_size=151_936, num_layers=36, embed_dim=4096, num_heads=32,
        num_kv_heads=8, head_dim=128, mlp_dim=12_288, norm_eps=1e-6, rope_base=1_000_000.0,
        qk_norm=True, remat="full",
    )  # fmt: skip
    return c
