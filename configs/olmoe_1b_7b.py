"""OLMoE 1B 7B (arXiv:2409.02060): 6,919,161,856 parameters, of which a token goes through 1,282,017,280.

    jaxscale convert --from=OLMoE-1B-7B-0924 --workdir=runs/olmoe    # a folder with the model's files
    python -m jaxscale.main --config=configs/olmoe_1b_7b.py --init_from=runs/olmoe

Shape and weight of the balance loss: transformers' OlmoeConfig, with experts 1024 wide as the paper has them; their sum
is the count of the published weights. All else is as in mixtral_8x7b.py.
Measured on one H200 (jax 0.11.2, 2026-11-26): steps of 8 rows, 42,541 tokens/s, MFU 33.9%, 122.4 GiB; not trained.
docs/explanation/mixtures.md#on-a-gpu has what it takes.
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
