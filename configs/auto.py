"""A Llama whose width, heads, batch size, decay and tokens follow from its depth by published rules.

    python -m jaxscale.main --config=configs/auto.py:depth=4       # 3.3e6 parameters, 66e6 tokens

Cost: 1.7e15 FLOPs at depth 4, 9.7e17 at 12 (2.2 hours of one A100 at 40% MFU), 2e19 at 20; it grows as depth**6.
Data: the bytes of Python's standard library, or --config.data.name=files --config.data.files='corpus/*.txt'

The optimizer is Muon, which reached a lower loss than AdamW at depths 1, 2 and 3. Its learning rate, 0.024 /
sqrt(depth), is near the best at these depths (docs/lab.md). Depths of 4 or more and vocabularies above 264 were not
tried. muP and offloading are not supported.
"""

import ml_collections


def get_config(arg="depth=4"):
    name, _, value = arg.partition("=")
    if name != "depth" or not value.isdigit() or not int(value):
        raise TypeError(f"the argument is {arg!r}; write configs/auto.py:depth=N with N at least 1")
    depth, vocab_size, seq_len = int(value), 264, 1024
    width = 64 * depth  # aspect ratio 64, in the flat basin of arXiv:2001.08361, figure 5
    head_dim = 128 if width % 128 == 0 and width >= 1024 else 64
    mlp_dim = 64 * round(8 / 3 * width / 64)  # SwiGLU at equal parameters (arXiv:2002.05202)
    matrices = depth * (4 * width**2 + 3 * width * mlp_dim) + vocab_size * width
    train_tokens = 20 * matrices  # arXiv:2203.15556
    flops = (6 * matrices + 6 * depth * width * seq_len) * train_tokens
    batch_tokens = 0.2920 * flops**0.3271  # arXiv:2401.02954, equation 1
    # The effect of an update of a block's matrix does not depend on the width (arXiv:2310.17813), which is 64 * depth.
    peak_lr = 0.024 / depth**0.5
    rows = max(8, 8 * round(batch_tokens / seq_len / 8))

    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens, c.train_tokens = seq_len, rows * seq_len, train_tokens
    heads = dict(num_heads=width // head_dim, num_kv_heads=width // head_dim, head_dim=head_dim)
    c.model = dict(name="llama", vocab_size=vocab_size, num_layers=depth, embed_dim=width, mlp_dim=mlp_dim, **heads)
    # A cosine decay to a tenth (arXiv:2203.15556, appendix B); weight decay and warmup: arXiv:2005.14165.
    c.optim = dict(name="muon", peak_lr=peak_lr, min_lr=peak_lr / 10, weight_decay=0.1, warmup_tokens="1%")
    c.data = dict(name="stdlib")
    c.sample = dict(num_tokens=200)
    return c
