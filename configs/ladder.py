"""A scaling ladder: small runs, such as 'embed_dim=96,tokens=400_000', that forecast the loss of a larger run.

    for D in 64 96 128; do for T in 200_000 400_000 800_000; do
        python -m jaxscale.main --config=configs/ladder.py:embed_dim=$D,tokens=$T --workdir=runs/ladder/$D-$T
    done; done
    jaxscale plan --loss --runs='runs/ladder/*' --config=configs/ladder.py:embed_dim=192,tokens=1_600_000

All runs share data, tokenizer, sequence length, batch size and shape of the schedule, as a loss law requires. The
learning rate scales as 1 / width. Cost: 14 minutes for nine runs on two busy cores (2026-11-22, jax 0.10.2). See
docs/loss_law.md.
"""

import ml_collections


def get_config(argument="embed_dim=64,tokens=400_000"):
    rung = dict(part.partition("=")[::2] for part in argument.split(","))
    if set(rung) != {"embed_dim", "tokens"} or int(rung["embed_dim"]) % 32:
        raise TypeError(f"the argument is {argument!r}; write embed_dim=N,tokens=M with N a multiple of 32")
    D, c = int(rung["embed_dim"]), ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = 256, 8 * 256
    c.train_tokens = int(rung["tokens"])
    c.model = dict(
        name="llama", vocab_size=264, num_layers=max(2, D // 32), embed_dim=D, num_heads=D // 32, num_kv_heads=D // 32,
        head_dim=32, mlp_dim=3 * D, compute_dtype="float32",
    )  # fmt: skip
    peak = 0.5 / D  # 2e-3 at a width of 256, as in the quick start
    c.optim = dict(peak_lr=peak, min_lr=peak / 20, warmup_tokens="5%")
    c.data = dict(name="stdlib")
    c.eval = dict(every_steps=0, num_rows=128)
    c.monitor = dict(log_every_steps=2)
    return c
