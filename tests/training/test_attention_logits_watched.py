"""The largest attention logit that a run tells is that of the whole table of scores in float64, layer by layer.

B batch  T query position  S key position  N query heads  K key-value heads  H head dim
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.core.models.layers import merge_model
from jaxscale.core.models.model import summed_loss
from jaxscale.core.plan import UNSHARDED
from jaxscale.kernels.attention import xla
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.training.statistics_runner import flatten_statistics

BATCH = tiny.packed_batch(0)  # rows of several documents, a third of them with padding


def largest_scores(cfg, params, *, window=None, softcap=None):
    """float64 of each layer: the queries and keys that attention meets, multiplied out."""
    found, segments_BT, plain = [], BATCH.segment_ids, xla.make_attend(window=window, softcap=softcap)
    behind_TS = np.subtract.outer(*[np.arange(segments_BT.shape[1])] * 2)
    seen_BTS = (segments_BT[:, :, None] == segments_BT[:, None, :]) & (segments_BT > 0)[:, :, None]
    seen_BTS &= (behind_TS >= 0) & (behind_TS < (window or segments_BT.shape[1]))

    def attend(q_BTNH, k_BSKH, v_BSKH, segments, **how):
        q_BTNH, k_BSKH = (np.asarray(x, np.float64) for x in (q_BTNH, k_BSKH))
        k_BSNH = np.repeat(k_BSKH, q_BTNH.shape[2] // k_BSKH.shape[2], axis=2)
        scores_BNTS = np.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH) / np.sqrt(q_BTNH.shape[-1])
        found.append(scores_BNTS.max(where=seen_BTS[:, None], initial=-np.inf))
        q_BTNH, k_BSKH = (jnp.asarray(x, jnp.float32) for x in (q_BTNH, k_BSKH))
        return plain(q_BTNH, k_BSKH, v_BSKH, segments, **how)

    graphdef = tiny.graphdef(cfg, UNSHARDED.replace(attend=attend))
    summed_loss(merge_model(graphdef, params), jax.tree.map(jnp.asarray, BATCH), None, {})
    return found


soak = lambda name: pytest.param(name, marks=pytest.mark.soak)
CASES = {
    "gpt2": tiny.GPT2,
    "window": tiny.LLAMA | {"attention_window": 3},
    "llama": tiny.LLAMA,  # two query heads to a key-value head, as all of these
    "blockwise window": tiny.LLAMA | {"attention_window": 3, "attention": "blockwise"},
    "softcap": tiny.LLAMA | {"qk_norm": True, "attention_softcap": 2.0},  # which comes behind what is watched
}


@pytest.mark.parametrize("name", ["window", *map(soak, ("gpt2", "llama", "blockwise window", "softcap"))])
@pytest.mark.soak
def test_the_logits_of_a_run_are_those_of_a_dense_table_in_float64(name):
    model = CASES[name]
    cfg = tiny.config({"model": model | {"scan_layers": False, "remat": "none"}})
    program = make_program(cfg, resolve_budget(cfg, None), jax.devices()[:1])
    state = program.init()
    told = flatten_statistics(jax.device_get(program.statistics(state, tiny.on_mesh(program, BATCH))))
    how = {name: model.get(f"attention_{name}") for name in ("window", "softcap")}
    expected = largest_scores(cfg.model, tiny.host(state.params), **how)
    found = [value for name, value in told.items() if name.startswith("stats/attention_logit_max/")]
    assert len(found) == len(expected) == 2
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # float32 products, taken in another order
