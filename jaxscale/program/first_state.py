"""The state before the first step: parameters initialized from the seed, and the initial optimizer state."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from jaxscale.config import RunConfig
from jaxscale.core.ema import init_ema
from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.layers import split_model
from jaxscale.core.models.lora_mup_config import LoraConfig
from jaxscale.core.models.model import make_model
from jaxscale.core.models.sharded import ShardedModel
from jaxscale.core.optim.optimizer import trainable
from jaxscale.core.shardings import with_shardings
from jaxscale.core.state import TrainState, init_loss_scale, init_state
from jaxscale.kernels.compiler_options import fast_compile_options
from jaxscale.kernels.host_memory import device_zeros


def make_init(
    cfg: RunConfig, model: ShardedModel, optimizer: optax.GradientTransformation, groups: Any, shardings: TrainState
) -> tuple[Callable[[], TrainState], TrainState]:
    """Returns (function that makes the state before the first step, its shapes, dtypes and shardings).

    groups: a ParamGroup for each parameter. shardings: of the state, with which its arrays are created.
    """
    param_shardings, tree = jax.tree.flatten(shardings.params)
    keys = lambda: jax.random.split(jax.random.key(cfg.seed))  # of the parameters and of the run

    def make_state(params: Any) -> TrainState:
        return init_state(
            params,
            optimizer,
            init_loss_scale(cfg.train.loss_scale, cfg.model.compute_dtype),
            keys()[1],
            init_ema(cfg.train.ema, trainable(params, groups)),
            cfg.train.guard.window_steps,
        )

    @functools.partial(jax.jit, out_shardings=shardings._replace(params=None))
    def init_without_params(params: Any) -> TrainState:
        # the initial optimizer state does not depend on the parameters, which may be in host memory
        return make_state(params if cfg.train.ema.on else device_zeros(params))._replace(params=None)

    def init() -> TrainState:
        init_params = make_init_params(cfg.model, cfg.lora, tuple(param_shardings))
        params = tree.unflatten(init_params(np.asarray(jax.random.key_data(keys()[0]))))
        return init_without_params(params)._replace(params=params)

    return init, with_shardings(jax.eval_shape(make_state, model.shapes), shardings)


@functools.lru_cache(maxsize=16)
def make_init_params(
    cfg: AnyModelConfig, lora: LoraConfig, shardings: tuple[NamedSharding, ...]
) -> Callable[[np.ndarray], list[jax.Array]]:
    """Returns the jitted function that initializes the leaves of the parameters from a key, uint32[2].

    It takes 0.3 to 0.8 s to compile for models of the tests, as long as their step (jax 0.10.2, 2 cores, 2026-11-26),
    so runs that differ in other settings or in their seed share it, in a process and in a compilation cache.
    """

    platform = next(iter(shardings[0].device_set)).platform

    @functools.partial(jax.jit, out_shardings=list(shardings), compiler_options=fast_compile_options(platform) or None)
    def init_params(key: jax.Array) -> list[jax.Array]:
        model = make_model(cfg, key=jax.random.wrap_key_data(key), lora=lora)
        return jax.tree.leaves(split_model(model)[1])

    return init_params
