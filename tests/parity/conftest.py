"""The references of the scripts here, with the names of transformers turned into ours.

B batch  T position  V vocab
"""

import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxscale.core.batch import Batch
from jaxscale.core.models.layers import merge_model, split_model
from jaxscale.core.models.model import logits, make_model, summed_loss
from jaxscale.core.plan import UNSHARDED
from jaxscale.runtime.checkpoint.record import nest
from jaxscale.tools.interop import families
from jaxscale.tools.interop.chunking import array_shapes

HERE = pathlib.Path(__file__).parent


class Reference:
    """One .npz: its config, its arrays by name, its weights and gradients by the names of transformers."""

    def __init__(self, name, folder=HERE):
        with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        self.config = json.loads(str(arrays.pop("config")))
        self.weights = {key.removeprefix("param/"): a for key, a in arrays.items() if key.startswith("param/")}
        self.gradients = {key.removeprefix("grad/"): a for key, a in arrays.items() if key.startswith("grad/")}
        self.arrays = arrays

    def __getitem__(self, key):
        return self.arrays[key]


def config_of(hf, **changes):
    """Our settings for a config.json, of a Llama where it says no model_type."""
    _, cfg, _ = families.read({"model_type": "llama"} | hf)
    return dataclasses.replace(cfg, **{"compute_dtype": "float32"} | changes)


def params_of(cfg, arrays, pairs=None):
    """Our nested dict for {name in the checkpoint: array}, float32, or for its gradients: the change is linear.

    pairs: of the tensors; unless given those of a Llama.
    """
    pairs = pairs or families.match(families.FAMILIES["llama"], cfg, arrays)[0]
    leaves = {name: np.full(shape, np.nan, np.float32) for name, shape in array_shapes(pairs).items()}
    for pair in pairs:
        for name, array in zip(pair.leaves, pair.to_leaves(arrays[pair.hf_name]), strict=True):
            leaves[name][pair.place] = array
    assert not any(np.isnan(leaf).any() for leaf in leaves.values())
    return nest(leaves)


def next_token_batch(tokens_BT):
    """One document a row, in which every token but the last has a target."""
    B, T = tokens_BT.shape
    weights_BT = np.ones((B, T), np.float32)
    weights_BT[:, -1] = 0.0
    return Batch(
        tokens=tokens_BT,
        targets=np.roll(tokens_BT, -1, axis=1),
        positions=np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)),
        segment_ids=np.ones((B, T), np.int32),
        weights=weights_BT,
    )


class Computed(NamedTuple):
    """What our model makes of a batch; losses and gradients are means over the tokens that have a target."""

    logits: Any  # float32 [B, T, V]
    total: Any  # what is minimised
    parts: Any  # {name: loss}
    gradients: Any  # as the parameters


def compute(cfg, params, batch, *, plan=UNSHARDED, aux_weights=None):
    """Computed by the model of `cfg` with `params`, whose names and shapes must be the model's own."""
    abstract = jax.eval_shape(lambda key: make_model(cfg, key=key, plan=plan), jax.random.key(0))
    graphdef, own, _ = split_model(abstract)
    assert jax.tree.map(lambda leaf: leaf.shape, own) == jax.tree.map(np.shape, params)

    def objective(params, batch):
        model, tokens = merge_model(graphdef, params), batch.weights.sum()
        total, parts = summed_loss(model, batch, None, aux_weights or {})
        all_logits = logits(model, batch.tokens, batch.positions, batch.segment_ids)
        return total / tokens, (jax.tree.map(lambda part: part / tokens, parts), all_logits)

    (total, (parts, all_logits)), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(params, batch)
    return Computed(all_logits, total, parts, gradients)


def assert_close_trees(ours, theirs, tolerance):
    """Every leaf within tolerance * (1 + |theirs|)."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree_util.tree_leaves_with_path(theirs), strict=True)
    for (path, our), (_, their) in pairs:
        np.testing.assert_allclose(our, their, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))


class Parity(NamedTuple):
    """What the tests here share, handed over as one fixture."""

    load: Any = Reference  # load("llama") -> Reference
    config: Any = config_of
    params: Any = params_of
    make_batch: Any = next_token_batch
    compute: Any = compute
    assert_close_trees: Any = assert_close_trees


@pytest.fixture(scope="session")
def parity():
    return Parity()
