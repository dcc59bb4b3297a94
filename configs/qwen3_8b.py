"""Qwen3 8B (arXiv:2505.09388): 8,190,735,360 parameters. Measured: nothing yet.

    jaxscale convert --from=Qwen3-8B-Base --workdir=runs/qwen3    # a folder with the model's files
    jaxscale prepare --input='raw/*.jsonl' --output=shards --config.tokenizer.name=runs/qwen3/tokenizer/tokenizer.json
    python -m jaxscale.main --config=configs/qwen3_8b.py --init_from=runs/qwen3

Shape: config.json of Qwen/Qwen3-8B. All but the model is as in llama3_8b.py.
Continued pretraining of one billion tokens at 40% MFU costs 80 chip-hours of TPU v5p (459 TFLOP/s).
Preflight: jaxscale preflight --config=configs/qwen3_8b.py --topology='v5p:2x2x2'
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
