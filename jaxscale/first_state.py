"""The state before the first step: parameters drawn from the seed, and what an optimizer begins with."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from jaxscale.config import RunConfig
from jaxscale.models import AnyModelConfig
from jaxscale.models.config import LoraConfig
from jaxscale.models.layers import split_model
from jaxscale.models.model import make_model
from jaxscale.models.sharded import ShardedModel
from jaxscale.ops.kernels import PLAIN
from jaxscale.optim.optimizers import trainable
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

    def state_of(params: Any) -> TrainState:
        return init_state(
            params,
            optimizer,
            init_loss_scale(cfg.train.loss_scale, cfg.model.compute_dtype),
            seed_keys(cfg.seed)[1],
            init_ema(cfg.train.ema, trainable(params, groups)),
            cfg.train.guard.window_steps,
        )

    @functools.partial(jax.jit, out_shardings=shardings._replace(params=None))
    def beside(params: Any) -> TrainState:
        return state_of(params if cfg.train.ema.on else device_zeros(params))._replace(params=None)

    def init() -> TrainState:
        params = tree.unflatten(drawn_params(cfg.model, cfg.lora, cfg.seed, tuple(places))())
        return beside(params)._replace(params=params)

    return init, with_shardings(jax.eval_shape(state_of, model.shapes), shardings)


@functools.lru_cache(maxsize=16)
def drawn_params(
    cfg: AnyModelConfig, lora: LoraConfig, seed: int, shardings: tuple[NamedSharding, ...]
) -> Callable[[], list[jax.Array]]:
    """The jitted function that draws the leaves of the parameters. Drawing takes as long to compile as a small model's
    step, so runs of a process, and of a compilation cache, share it where they differ in other settings."""

    @functools.partial(jax.jit, out_shardings=list(shardings))
    def draw() -> list[jax.Array]:
        model = make_model(cfg, key=seed_keys(seed)[0], kernels=PLAIN, lora=lora)
        return jax.tree.leaves(split_model(model)[1])

    return draw


def seed_keys(seed: int) -> jax.Array:
    """The keys of the parameters and of the run."""
    return jax.random.split(jax.random.key(seed))
