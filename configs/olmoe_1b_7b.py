"""OLMoE 1B 7B (arXiv:2409.02060): 6,919,161,856 parameters, 1,282,017,280 active per token.

    jaxscale convert --from=OLMoE-1B-7B-0924 --workdir=runs/olmoe    # a folder with the model's files
    python -m jaxscale.main --config=configs/olmoe_1b_7b.py --init_from=runs/olmoe

Shape and weight of the balance loss: transformers' OlmoeConfig, with the paper's expert width of 1024. The number of
parameters equals that of the published weights. Other settings are those of mixtral_8x7b.py.
Measured on one H200 (jax 0.11.2, 2026-11-26): 8 rows per step, 42,541 tokens/s, MFU 33.9%, 122.4 GiB; not trained.
See docs/explanation/mixtures.md#on-a-gpu.
Continued pretraining of one billion tokens at 40% MFU costs 12 chip-hours of TPU v5p (459 TFLOP/s).
"""

import mixtral_8x7b


def get_config():
    c = mixtral_8x7b.get_config()
    c.model = dict(
        name="llama", vocab_size=50_304, num_layers=16, embed_dim=2048, num_heads=16,
        num_kv_heads=16, head_dim=128, mlp_dim=1024, norm_eps=1e-5, rope_base=10_000.0,
        qk_norm=True, qk_norm_over="all_heads", experts=dict(number=64, chosen=8, mlp_dim=1024, normalised=False),
        remat="full",
    )  # fmt: skip
    c.train.aux_losses = dict(balance_loss=0.01)
    return c
