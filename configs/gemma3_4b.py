"""The language model of Gemma 3 4B (arXiv:2503.19786): 3,880,263,168 parameters. Not measured.

    jaxscale convert --from=gemma-3-4b-pt --workdir=runs/gemma3    # a folder with the model's files
    jaxscale prepare --input='raw/*.jsonl' --output=shards --config.tokenizer.name=runs/gemma3/tokenizer/tokenizer.json
    python -m jaxscale.main --config=configs/gemma3_4b.py --init_from=runs/gemma3

Shape: config.json of google/gemma-3-4b-pt and transformers' Gemma3TextConfig; without its vision part. Other settings
are those of llama3_8b.py.
Continued pretraining of one billion tokens at 40% MFU costs 37 chip-hours of TPU v5p (459 TFLOP/s).
Preflight, remat full: peak memory per chip; minimum step time, exposed part; maximum MFU; sent
(2026-11-24, jax 0.12.0.1, libtpu 0.0.51)
    v5p:2x2x2: 28.1 GiB; 4.63 s, 0.02 s exposed; 75%; 28 GB
"""

import llama3_8b


def get_config():
    c = llama3_8b.get_config()
    c.model = dict(
        name="llama", vocab_size=262_208, num_layers=34, embed_dim=2560, num_heads=8,
        num_kv_heads=4, head_dim=256, mlp_dim=10_240, norm_eps=1e-6, rope_base=1_000_000.0,
        rope_scaling=dict(name="linear", factor=8.0), attention_window=1024, global_every=6, local_rope_base=10_000.0,
        qk_norm=True, norm_placement="both", zero_centred_norms=True, activation="gelu_tanh", scaled_embeddings=True,
        tied_embeddings=True, remat="full",
    )  # fmt: skip
    return c
