"""GPT-2 124M: 124,439,808 parameters, 2.5e9 tokens (20 per parameter), 2.0e18 FLOPs. Not measured.

    python -m jaxscale.main --config=configs/gpt2_124m.py --config.data.files='corpus/*.txt' \
        --config.data.tokenizer=tokenizer.json

Cost at 40% MFU: 4.4 hours of one A100 (312 TFLOP/s).
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len = 1024
    c.batch_tokens = 512 * 1024  # GPT-3 Small's 0.5M (arXiv:2005.14165, table 2.1)
    c.train_tokens = 2_500_000_000
    c.model = dict(name="gpt2", vocab_size=50_257, num_layers=12, embed_dim=768, num_heads=12, max_seq_len=1024)
    c.optim = dict(peak_lr=6e-4, min_lr=6e-5, warmup_tokens="375 steps")  # learning rate of the same table
    c.train = dict(num_microbatches=16)
    c.data = dict(files="corpus/*.txt", tokenizer="tokenizer.json")
    c.eval = dict(every_steps=250, num_rows=512)
    c.checkpoint = dict(save_every_steps=250)
    c.sample = dict(num_tokens=200)
    return c
