"""The state before the first step: parameters drawn from the seed, and what an optimizer begins with."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from jaxscale.config import RunConfig
from jaxscale.models import AnyModelConfig
from jaxscale.models.config import LoraConfig
from jaxscale.models.layers import split_model
from jaxscale.models.model import make_model
from jaxscale.models.sharded import ShardedModel
from jaxscale.ops.kernels import XLA_KERNELS
from jaxscale.optim.optimizers import trainable
from jaxscale.sharding.compiler_options import fast_compile_options
from jaxscale.sharding.offload import device_zeros
from jaxscale.sharding.shardings import with_shardings
from jaxscale.training.ema import init_ema
from jaxscale.training.state import TrainState, init_loss_scale, init_state


def make_init(
    cfg: RunConfig, model: ShardedModel, optimizer: optax.GradientTransformation, groups: Any, shardings: TrainState
) -> tuple[Callable[[], TrainState], TrainState]:
    """(a function that makes the state before the first step, the shapes, dtypes and shardings of what it makes).

    groups: a Group for each parameter. shardings: of the state; each array is born with its own.
    """
    places, tree = jax.tree.flatten(shardings.params)
    keys = lambda: jax.random.split(jax.random.key(cfg.seed))  # of the parameters and of the run

    def state_of(params: Any) -> TrainState:
        return init_state(
            params,
            optimizer,
            init_loss_scale(cfg.train.loss_scale, cfg.model.compute_dtype),
            keys()[1],
            init_ema(cfg.train.ema, trainable(params, groups)),
            cfg.train.guard.window_steps,
        )

    @functools.partial(jax.jit, out_shardings=shardings._replace(params=None))
    def beside(params: Any) -> TrainState:
        # Optimizers begin with zeros whatever the parameters are, which may lie in the host's memory.
        return state_of(params if cfg.train.ema.on else device_zeros(params))._replace(params=None)

    def init() -> TrainState:
        draw = drawn_params(cfg.model, cfg.lora, tuple(places))
        params = tree.unflatten(draw(np.asarray(jax.random.key_data(keys()[0]))))
        return beside(params)._replace(params=params)

    return init, with_shardings(jax.eval_shape(state_of, model.shapes), shardings)


@functools.lru_cache(maxsize=16)
def drawn_params(
    cfg: AnyModelConfig, lora: LoraConfig, shardings: tuple[NamedSharding, ...]
) -> Callable[[np.ndarray], list[jax.Array]]:
    """The jitted function that draws the leaves of the parameters by a key, uint32[2].

    It takes 0.3 to 0.8 s to compile for models of the tests, as long as their step (jax 0.10.2, 2 cores, 2026-11-26):
    runs that differ in other settings or in their seed share it, in a process and in a compilation cache.
    """

    platform = next(iter(shardings[0].device_set)).platform

    @functools.partial(jax.jit, out_shardings=list(shardings), compiler_options=fast_compile_options(platform) or None)
    def draw(key: jax.Array) -> list[jax.Array]:
        model = make_model(cfg, key=jax.random.wrap_key_data(key), kernels=XLA_KERNELS, lora=lora)
        return jax.tree.leaves(split_model(model)[1])

    return draw
