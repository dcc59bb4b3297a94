"""Every choice of kernels computes the same small layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.core.plan import UNSHARDED, single_device_plan
from jaxscale.kernels.activation import swiglu
from jaxscale.kernels.config import AttentionNeeds
from jaxscale.kernels.norm import rms_norm
from jaxscale.kernels.rope import make_rotation

B, T, D, N, H, F = 2, 20, 8, 2, 4, 12
NEEDS = AttentionNeeds(head_dim=H, dtype="float32")


def layer_loss(plan, params, x, segment_ids_BT):
    """A whole decoder layer, summed to one number."""
    positions_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    h = rms_norm(x, params["norm"], 1e-5)
    q, k, v = (plan.project("BTD,DNH->BTNH", h, params[name]) for name in ("wq", "wk", "wv"))
    rotation = make_rotation(positions_BT, H, 100.0)
    out = plan.attend(plan.rotate(q, rotation), plan.rotate(k, rotation), v, segment_ids_BT)
    x = x + plan.project("BTNH,NHD->BTD", out, params["wo"])
    gate, up = (plan.project("BTD,DF->BTF", x, params[name]) for name in ("gate", "up"))
    return jnp.sum(jnp.sin(plan.project("BTF,FD->BTD", swiglu(gate, up), params["down"])))


@pytest.mark.slow
def test_cpu_kernels_give_the_loss_and_gradients_of_the_plain_ones():
    random = np.random.default_rng(0)
    shapes = dict(wq=(D, N, H), wk=(D, N, H), wv=(D, N, H), wo=(N, H, D), gate=(D, F), up=(D, F), down=(F, D))
    shapes["norm"] = (D,)
    params = {name: jnp.asarray(0.3 * random.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    x = jnp.asarray(random.standard_normal((B, T, D)), jnp.float32)
    segment_ids_BT = jnp.asarray([[1] * 12 + [2] * 8, [1] * 18 + [0] * 2], jnp.int32)
    step = jax.value_and_grad(lambda params, plan: layer_loss(plan, params, x, segment_ids_BT))
    step = jax.jit(step, static_argnums=1)
    for plan in (single_device_plan("cpu", "auto", NEEDS), single_device_plan("tpu", "xla", NEEDS)):
        for got, right in zip(jax.tree.leaves(step(params, plan)), jax.tree.leaves(step(params, UNSHARDED))):
            np.testing.assert_allclose(
                got, right, rtol=1e-5, atol=2e-5
            )  # float32 sums in another order, 5 products deep


def test_kernels_name_their_attention():
    chosen = [single_device_plan(platform, "auto", NEEDS).attention.name for platform in ("cpu", "gpu", "tpu")]
    assert chosen == ["blockwise", "xla", "splash"]  # cudnn computes in narrower types only
