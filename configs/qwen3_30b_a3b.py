"""Qwen3 30B A3B (arXiv:2505.09388): 30,532,122,624 parameters, 3,353,032,704 active per token.
Not measured.

    jaxscale convert --from=Qwen3-30B-A3B-Base --workdir=runs/qwen3    # a folder with the model's files
    python -m jaxscale.main --config=configs/qwen3_30b_a3b.py --init_from=runs/qwen3

Shape: config.json of Qwen/Qwen3-30B-A3B, from a copy. Other settings are those of mixtral_8x7b.py.
Compiled, not timed (jax 0.12.0.1, libtpu 0.0.51, 2026-11-25): v5p:4x4x4: 14.6 GiB per chip, minimum step time
1.34 s, maximum MFU 62%; v6e:8x8: 14.7 GiB, 1.36 s, 0.76 s exposed communication, 30%.
Continued pretraining of one billion tokens at 40% MFU costs 35 chip-hours of TPU v5p (459 TFLOP/s).
"""

import mixtral_8x7b


def get_config():
    c = mixtral_8x7b.get_config()
    c.model = dict(
        name="llama", vocab_size=151_936, num_layers=48, embed_dim=2048, num_heads=32,
        num_kv_heads=4, head_dim=128, mlp_dim=6144, norm_eps=1e-6, rope_base=1_000_000.0,
        qk_norm=True, experts=dict(number=128, chosen=8, mlp_dim=768),
        remat="full",
    )  # fmt: skip
    c.train.aux_losses.balance_loss = 0.001
    return c
