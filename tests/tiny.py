"""A run so small that it compiles in seconds, shared by the tests of many rooms.

B batch  T position
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxscale import schema
from jaxscale.build import Program, make_program
from jaxscale.config import RunConfig
from jaxscale.core.batch import Batch
from jaxscale.core.models.layers import split_model
from jaxscale.core.models.model import make_model
from jaxscale.core.plan import UNSHARDED, ParallelPlan
from jaxscale.program.budget import resolve_budget

ROWS, SEQ_LEN, VOCAB = 16, 16, 64

LLAMA = dict(
    name="llama", vocab_size=VOCAB, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32,
    compute_dtype="float32", attention="xla",
)  # fmt: skip
# What Llama's relatives differ by, all at one time. The window is shorter than a row; the last of 3 layers is local.
RELATIVE = LLAMA | dict(
    num_layers=3, qkv_bias=True, out_bias=True, qk_norm=True, qk_norm_over="all_heads", norm_placement="both",
    zero_centred_norms=True, activation="gelu_tanh", scaled_embeddings=True, tied_embeddings=True, query_scalar=5.0,
    attention_window=5, global_every=2, local_rope_base=100.0, attention_softcap=3.0, logit_softcap=4.0,
)  # fmt: skip
GPT2 = dict(
    name="gpt2", vocab_size=VOCAB, num_layers=2, embed_dim=16, num_heads=2, max_seq_len=32, compute_dtype="float32",
    attention="xla",
)  # fmt: skip
ENCODER = dict(
    name="encoder", vocab_size=VOCAB, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32, max_seq_len=32,
    num_token_types=2, compute_dtype="float32", attention="xla",
)  # fmt: skip
T5 = dict(
    name="t5", vocab_size=VOCAB, num_layers=2, num_decoder_layers=1, embed_dim=16, num_heads=2, head_dim=8, mlp_dim=32,
    num_buckets=8, max_distance=16, compute_dtype="float32", attention="xla",
)  # fmt: skip
VALUES = dict(
    seq_len=SEQ_LEN,
    batch_tokens=ROWS * SEQ_LEN,
    train_tokens="20 steps",
    seed=1,
    model=LLAMA,
    optim=dict(peak_lr=1e-2, min_lr=1e-3, warmup_tokens="2 steps"),
    data=dict(name="synthetic"),
)


def config(overrides: dict[str, Any] | None = None) -> RunConfig:
    """The tiny run, with settings changed by their dotted names."""
    return schema.from_dict(RunConfig, schema.merge(VALUES, overrides or {}))


@functools.cache
def cached_program(overrides: tuple[tuple[str, Any], ...], num_devices: int) -> Program:
    cfg = config(dict(overrides))
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:num_devices])


def program(overrides: dict[str, Any] | None = None, num_devices: int = 1) -> Program:
    """What the tiny run compiles to; the same object, compiled once, for the same arguments."""
    return cached_program(tuple(sorted((overrides or {}).items())), num_devices)


def reuse(program: Program) -> Callable[[RunConfig, Any], Program]:
    """make_program, for open_run, of a run that differs from the program's config in what the host does alone."""
    return lambda cfg, budget: dataclasses.replace(program, cfg=cfg)


def packed_batch(n: int, rows: int = ROWS, seq_len: int = SEQ_LEN, vocab: int = VOCAB) -> Batch:
    """Random rows of one to three documents, with padding of uneven length: a pure function of n."""
    rng = np.random.default_rng(n)
    tokens_BT = rng.integers(0, vocab, (rows, seq_len + 1), dtype=np.int32)
    segment_ids_BT = np.zeros((rows, seq_len + 1), np.int32)
    positions_BT = np.zeros((rows, seq_len), np.int32)
    for row in range(rows):
        end = seq_len + 1 if row % 3 else int(rng.integers(3, seq_len))  # a third of the rows end in padding
        starts = sorted({0, *rng.integers(1, end, 2).tolist()})
        for number, (start, stop) in enumerate(zip(starts, [*starts[1:], end]), 1):
            segment_ids_BT[row, start:stop] = number
            positions_BT[row, start : min(stop, seq_len)] = np.arange(min(stop, seq_len) - start)
    now_BT, next_BT = segment_ids_BT[:, :-1], segment_ids_BT[:, 1:]
    weights_BT = ((now_BT == next_BT) & (now_BT > 0)).astype(np.float32)
    return Batch(tokens_BT[:, :-1].copy(), tokens_BT[:, 1:].copy(), positions_BT, now_BT.copy(), weights_BT)


def on_mesh(program: Program, batch: Batch) -> Batch:
    """The batch where the program's step wants it."""
    return jax.device_put(batch, program.batch_sharding)


def placed(program: Program, state: Any) -> Any:
    """What its init() would give, of the first state of the same model on other devices: nothing is drawn again."""
    return jax.device_put(host(state), jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state))


def values_and_gradients(f: Callable, dy: Any, *given: Any) -> list[jax.Array]:
    """f(*given) and the gradients of all that is given, for dy: compiled, for one operation at a time is slow."""

    def both(dy, *given):
        y, pull = jax.vjp(f, *given)
        return y, pull(dy)

    return jax.tree.leaves(jax.jit(both)(dy, *given))


def graphdef(cfg: Any, plan: ParallelPlan = UNSHARDED) -> nnx.GraphDef:
    """What merge_model completes with parameters, none of which is drawn for it."""
    return split_model(jax.eval_shape(lambda key: make_model(cfg, key=key, plan=plan), jax.random.key(0)))[0]


def host(tree: Any) -> Any:
    """A copy on the host, safe from donation."""
    return jax.tree.map(lambda leaf: np.array(leaf), tree)


def assert_same_bits(left: Any, right: Any) -> None:
    """Fails unless two trees of arrays are equal bit for bit, NaN and the sign of zero included."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right)):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), jax.tree_util.keystr(path)
