"""GPT-3's shape (arXiv:2005.14165, table 2.1): 174,604,836,864 parameters. Not measured.

    python -m jaxscale.main --config=configs/175b.py --config.data.files='shards/manifest.json'

Cost of the whole run at 40% MFU: 3.2e+23 FLOPs, 481,972 chip-hours of TPU v5p (459 TFLOP/s).
State in float32 (parameters, moments, gradients): 2,602 GiB over all chips.
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len = 2048
    c.batch_tokens = 1536 * 2048  # 3.1e6: the paper's 3.2e6, rounded to rows that divide evenly on many meshes
    c.train_tokens = 300_000_000_000
    c.mesh = dict(fsdp=-1, tensor=8)
    c.model = dict(
        name="gpt2",
        vocab_size=50_304,  # 50,257 padded to whole tiles
        num_layers=96,
        embed_dim=12_288,
        num_heads=96,
        max_seq_len=2048,
        remat="full",
    )
    c.optim = dict(peak_lr=6e-5, min_lr=6e-6, b2=0.95, warmup_tokens=375_000_000)
    c.data = dict(name="tokens", files="shards/manifest.json")
    c.eval = dict(every_steps=500, num_rows=768)
    c.checkpoint = dict(save_every_steps=250, keep_last=3, keep_every_steps=10_000)
    return c
