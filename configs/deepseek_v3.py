"""DeepSeek-V3 (arXiv:2412.19437): 671,026,404,352 parameters, 37,552,282,624 active per token; without
multi-token prediction. Not measured.

    python -m jaxscale.main --config=configs/deepseek_v3.py --config.data.files='shards/manifest.json'

Shape: transformers' DeepseekV3Config. Batch size, learning rate and balance: section 4.2 of the report, where the batch
size grew to this value and the learning rate stayed at the peak for 10T tokens. The released weights use YaRN; to
continue from them, set model.rope_scaling as `jaxscale convert` writes it.
Cost of the whole run at 40% MFU: 3.7e+24 FLOPs, 5,607,992 chip-hours of TPU v5p (459 TFLOP/s).
State in float32 (parameters, moments, gradients): 9,999 GiB over all chips.
Compiled for v5p:8x8x8, not timed (jax 0.12.0.1, libtpu 0.0.51, 2026-11-25): 50.7 GiB per chip; minimum step time
148 s, 54 s exposed communication; maximum MFU 45%. See docs/explanation/mixtures.md.
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = 4096, 15_360 * 4096
    c.train_tokens = 14_800_000_000_000
    c.mesh = dict(fsdp=-1, expert=64)
    c.model = dict(
        name="llama", vocab_size=129_280, num_layers=61, embed_dim=7168, num_heads=128, num_kv_heads=128,
        head_dim=192, mlp_dim=18_432, norm_eps=1e-6, rope_base=10_000.0, remat="full",
        latent=dict(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        experts=dict(number=256, chosen=8, mlp_dim=2048, shared_dim=2048, first_dense=3, score="sigmoid", scale=2.5,
                     groups=8, groups_chosen=4, group_best=2, bias=True),
    )  # fmt: skip
    c.train = dict(aux_losses=dict(row_balance_loss=0.0001), reduce_dtype="bfloat16", num_microbatches=10)
    c.optim = dict(peak_lr=2.2e-4, min_lr=2.2e-5, decay="wsd", decay_fraction=0.29, warmup_tokens="2000 steps")
    c.data = dict(name="tokens", files="shards/manifest.json")
    c.eval = dict(every_steps=1000, num_rows=2048)
    c.checkpoint = dict(save_every_steps=250, keep_last=3, keep_every_steps=10_000)
    return c
