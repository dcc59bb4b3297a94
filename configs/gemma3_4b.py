"""The language model of Gemma 3 4B (arXiv:2503.19786): 3,880,263,168 parameters. Measured: nothing yet.

    jaxscale convert --from=gemma-3-4b-pt --workdir=runs/gemma3_4b    # a folder with the model's files
    python -m jaxscale.main --config=configs/gemma3_4b.py --init_from=runs/gemma3_4b --config.data.files='shards/*.bin'

Shape: config.json of google/gemma-3-4b-pt and transformers' Gemma3TextConfig; its vision part is left out.
Continued pretraining of one billion tokens at 40% MFU costs 37 chip-hours of TPU v5p (459 TFLOP/s).
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = 8192, 64 * 8192
    c.train_tokens = 1_000_000_000
    c.mesh = dict(fsdp=-1)
    c.model = dict(
        name="llama", vocab_size=262_208, num_layers=34, embed_dim=2560, num_heads=8,
        num_kv_heads=4, head_dim=256, mlp_dim=10_240, norm_eps=1e-6, rope_base=1_000_000.0,
        rope_scaling=dict(name="linear", factor=8.0), attention_window=1024, global_every=6, local_rope_base=10_000.0,
        qk_norm=True, norm_placement="both", zero_centred_norms=True, activation="gelu_tanh", scaled_embeddings=True,
        tied_embeddings=True, remat="full",
    )  # fmt: skip
    c.optim = dict(peak_lr=2e-5, min_lr=2e-6, warmup_tokens="2%")  # of weights that have learned already
    c.data = dict(name="tokens", files="shards/*.bin")  # of the model's own tokenizer
    c.eval = dict(every_steps=100, num_rows=256)
    c.checkpoint = dict(save_every_steps=100, keep_last=3)
    return c
