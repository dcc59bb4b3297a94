"""The hash that the devices compute is that of the whole batch on the host, however it is divided."""

import jax
import numpy as np
import pytest
import tiny

from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.shardings import RULES, batch_sharding
from jaxscale.core.step import hash_tokens
from jaxscale.runtime.data.stacking import format_hash, tokens_hash


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 1, "data": 8}], ids=str)
def test_it_does_not_depend_on_the_mesh(mesh):
    batch = tiny.packed_batch(5)
    sharding = batch_sharding(make_mesh(MeshConfig(**mesh)), RULES["zero3"].params)
    placed = jax.tree.map(lambda field: jax.device_put(field, sharding), batch)
    assert format_hash(np.asarray(jax.jit(hash_tokens)(placed))) == tokens_hash(batch)


def test_one_token_or_two_that_change_places_change_both_halves_of_it():
    batch = tiny.packed_batch(5)
    swapped_BT, other_BT = batch.tokens.copy(), batch.tokens.copy()
    assert batch.tokens[2, 3] != batch.tokens[7, 1]
    swapped_BT[2, 3], swapped_BT[7, 1] = batch.tokens[7, 1], batch.tokens[2, 3]
    other_BT[2, 3] += 1
    hashes = [tokens_hash(batch._replace(tokens=tokens)) for tokens in (batch.tokens, swapped_BT, other_BT)]
    assert len({text[:8] for text in hashes}) == len({text[8:] for text in hashes}) == 3
