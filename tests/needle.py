"""What was planted far back in a row is found after a context was made longer, and not before.

    python tests/needle.py 0 1 2    # seeds; two minutes for each, on two busy cores

Rows are noise in which tokens are planted, each a key with its value; later each key is asked for once, and its value
alone is learned. A small model is trained on short rows, then YaRN (arXiv:2309.00071) makes the context FACTOR times
longer, and the training goes on, for a tenth of the steps, on rows of that length. RoPE's theta is 100: its slowest
wave is 5.5 short rows, as Llama 2's with theta 10,000 is 13 of its rows.

B batch  T position
"""

import sys

import jax
import numpy as np

from jaxscale import schema
from jaxscale.build import make_program
from jaxscale.config import RunConfig
from jaxscale.core.batch import Batch
from jaxscale.program.budget import resolve_budget

NOISE, KEYS, VALUES = 16, 8, 8  # kinds of tokens
PLANT, ASK = NOISE, NOISE + KEYS * VALUES  # the first token that plants a key with its value, and that asks for a key
ANSWER = ASK + KEYS  # the first value
SHORT, FACTOR, ROWS = 64, 4, 64
PLANTED = 4  # in a row of any length: longer ones are noise between them
SHORT_STEPS, LONG_STEPS = 600, 60
TESTED = 512  # rows
VALUES_OF = dict(
    seq_len=SHORT,
    batch_tokens=f"{ROWS} rows",
    model=dict(
        name="llama", vocab_size=ANSWER + VALUES, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16,
        mlp_dim=128, compute_dtype="float32", rope_base=100.0,
    ),
    data=dict(name="synthetic"),
)  # fmt: skip


def rows(rng, num, length):
    """(Batch, int[rows, T]: how far back the answer to what is asked there was planted, 0 where nothing is asked)."""
    tokens_BT = rng.integers(0, NOISE, (num, length + 1), dtype=np.int32)
    distance_BT = np.zeros((num, length), np.int32)
    for row in range(num):
        keys, values = rng.choice(KEYS, PLANTED, replace=False), rng.integers(0, VALUES, PLANTED)
        places = 2 * np.sort(rng.choice(length // 2, 2 * PLANTED, replace=False))
        begun: dict[int, int] = {}  # where each pair was planted
        for place, pair in zip(places.tolist(), rng.permutation(np.arange(2 * PLANTED) % PLANTED).tolist()):
            if pair not in begun:
                tokens_BT[row, place] = PLANT + keys[pair] * VALUES + values[pair]
                begun[pair] = place
            else:
                tokens_BT[row, place : place + 2] = ASK + keys[pair], ANSWER + values[pair]
                distance_BT[row, place] = place - begun[pair]
    places_BT = np.broadcast_to(np.arange(length, dtype=np.int32), (num, length)).copy()
    weights_BT = (distance_BT > 0).astype(np.float32)
    return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], places_BT, np.ones_like(places_BT), weights_BT), distance_BT


def make(seed, length, steps, peak_lr, scaling=None):
    """The compiled run on rows of so many tokens, as many tokens a step at each length."""
    values = schema.merge(VALUES_OF, {"train_tokens": f"{steps} steps", "seq_len": length, "seed": seed})
    values["batch_tokens"] = f"{ROWS * SHORT // length} rows"
    values["model"] = VALUES_OF["model"] | dict(rope_scaling=scaling)
    values["optim"] = dict(peak_lr=peak_lr, min_lr=peak_lr / 10, warmup_tokens="5%", weight_decay=0.0)
    cfg = schema.from_dict(RunConfig, values)
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:1])


def train(program, seed, steps, params=None):
    """The parameters after so many steps, from these or from random ones."""
    state, rng = program.init(), np.random.default_rng(seed)
    if params is not None:
        state = state._replace(
            params=jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), params, state.params)
        )
    for _ in range(steps):
        batch, _ = rows(rng, program.cfg.rows_per_step, program.cfg.seq_len)
        state, _ = program.train_step(state, jax.device_put(batch, program.batch_sharding))
    return jax.tree.map(np.asarray, state.params)


def found(program, params, seed=1000):
    """{distance up to SHORT, 2 SHORT, ...: part of the answers that are the likeliest token}, in the program's rows."""
    length = program.cfg.seq_len
    batch, distance_BT = rows(np.random.default_rng(seed), TESTED, length)
    score = jax.jit(program.model.target_scores)
    part = lambda first: jax.tree.map(lambda array: array[first : first + ROWS], batch)
    right_BT = np.concatenate([np.asarray(score(params, part(first))[1]) for first in range(0, TESTED, ROWS)])
    ends = [SHORT * 2**power for power in range((length // SHORT).bit_length())]
    inside = lambda end: (distance_BT > (end // 2 if end > SHORT else 0)) & (distance_BT <= end)
    return {end: round(float(right_BT[inside(end)].mean()), 3) for end in ends}


def measure(seed, say=print):
    """{what: found} of one seed: before, with YaRN and no training, after it; and the same training without YaRN."""
    long, yarn = SHORT * FACTOR, dict(name="yarn", factor=float(FACTOR), original_max_len=SHORT)
    short = make(seed, SHORT, SHORT_STEPS, 3e-3)
    begun = train(short, seed, SHORT_STEPS)
    told = {"short rows": found(short, begun)}
    for name, scaling in (("as it was", None), ("YaRN", yarn)):
        program = make(seed, long, LONG_STEPS, 1e-3, scaling)
        told[f"long rows, {name}"] = found(program, begun)
        told[f"long rows, {name}, trained on"] = found(program, train(program, 100 + seed, LONG_STEPS, begun))
    for name, parts in told.items():
        say(f"seed {seed}, {name}: " + ", ".join(f"up to {end} back {part:.1%}" for end, part in parts.items()))
    return told


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:] or ("0", "1", "2")):
        measure(seed)
