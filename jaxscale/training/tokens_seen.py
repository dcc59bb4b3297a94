"""Which tokens a step has really trained on: the hash of the global batch, computed where the batch is.

B batch  T position
"""

import jax
import jax.numpy as jnp

from jaxscale.data.batch import HASH_SALTS, Batch, hashed_parts, mixed_tokens


def tokens_seen(batch: Batch) -> jax.Array:
    """uint32[2]: what data.batch.tokens_hash gives for the whole batch, on any mesh and for any number of processes.

    Its words are added modulo 2**32, so that neither the sharding nor the order of the sum matters. One process alone
    could hash only the rows that it has read.
    """
    sums = [summed_words(words_BT, first_column) for words_BT, first_column in hashed_parts(batch)]
    return sum(sums[1:], sums[0])


def summed_words(tokens_BT: jax.Array, first_column: int) -> jax.Array:
    """uint32[2]: the sums for ids whose columns are numbered from first_column on."""
    row_BT = jax.lax.broadcasted_iota(jnp.uint32, tokens_BT.shape, 0)
    column_BT = jax.lax.broadcasted_iota(jnp.uint32, tokens_BT.shape, 1) + jnp.uint32(first_column)
    words_BT = tokens_BT.astype(jnp.uint32)
    sums = [jnp.sum(mixed_tokens(words_BT, row_BT, column_BT, salt), dtype=jnp.uint32) for salt in HASH_SALTS]
    return jnp.stack(sums)
