"""A mixture-of-experts layer compared with a dense MLP of equal FLOPs and with jax.lax.ragged_dot.

  python -m benchmarks.experts --dtype=bfloat16        # spec M; or --config=FILE of a mixture

Times the forward and backward pass over the tokens of a step, router included.

B batch  T position  D embed  E experts  n = B * T tokens  k experts of a token  R = n * k rows  C contracted  O output
"""

import dataclasses
import datetime
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from benchmarks import run_main, show
from jaxscale.config import RunConfig
from jaxscale.core.models.llama import LlamaMlp
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.moe import SparseMlp
from jaxscale.core.plan import ParallelPlan, single_device_plan
from jaxscale.kernels.matmul.grouped import run_grouped, weighted_activation
from jaxscale.kernels.matmul.slots import ExpertKernels
from jaxscale.runtime.monitor.runinfo import run_info
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system.exits import BadInput
from jaxscale.tools.qualify.step import SpecFlags, read_config
from jaxscale.tools.qualify.timing import seconds_of
from jaxscale.units import table

SKEWED = 1.4  # rows of the busiest expert over the mean, as measured for a trained router (configs/small_mixture.py)
NEAR = 0.05  # relative tolerance of SKEWED
WARM_TURNS = 3
RAGGED_PART = 6  # ragged_dot is this many times slower on a CPU, so it gets fewer turns
HALVINGS, MOST_PUSH = 30, 64.0  # bisection steps, and the largest bias of the router's logits
EVEN, RAGGED, UNEVEN = "new router", "new router, ragged_dot", f"busiest {SKEWED} times the mean"

Pass = Callable[[jax.Array], Any]


def measure_experts(name: str, cfg: RunConfig, *, rounds: int) -> dict[str, Any]:
    """Returns the record of --json: seconds of each layer, and of the dense layer in the same turns.

    Nothing is trained. One router is newly initialized, and another is biased so that one expert has SKEWED times the
    mean rows. Raises BadInput for a model without experts.
    """
    model = cfg.model
    if not isinstance(model, LlamaConfig) or model.experts is None:
        raise BadInput(f"{name} has no experts; pass --spec=M, or --config=FILE with a mixture")
    device = jax.devices()[0]
    plan = single_device_plan(device.platform, model.attention, model.attention_needs(), device)
    dense = LlamaMlp(model, model.experts.active_dim, rngs=nnx.Rngs(params=cfg.seed), plan=plan)
    keys, shape = jax.random.split(jax.random.key(cfg.seed)), (cfg.rows_per_step, cfg.seq_len, model.embed_dim)
    draw = lambda key: jax.random.normal(key, shape).astype(model.compute_dtype)
    x_BTD, dy_BTD = draw(keys[0]).at[..., 0].set(1), draw(keys[1])  # the router weight of a channel of ones is a bias
    run_dense = pass_of(dense, lambda mlp, x_BTD: (mlp(x_BTD), ()), dy_BTD)
    alone = {EVEN: make_sparse(model, plan, cfg.seed), UNEVEN: make_sparse(model, plan, cfg.seed)}
    router = pushed_router(alone[UNEVEN], x_BTD)
    if router is None:
        del alone[UNEVEN]
    else:
        alone[UNEVEN].router[...] = router
    ragged = ExpertKernels(ragged_project, run_grouped, weighted_activation, as_bits=plan.expert_kernels.as_bits)
    by_ragged = {RAGGED: make_sparse(model, plan.replace(expert_kernels=ragged), cfg.seed)}
    # ragged_dot runs separately: it evicts the caches, which would slow down the next layer.
    layers = [
        dict(name=name, busiest=busiest_share(mlp, x_BTD), **found)
        for group, turns in ((alone, rounds), (by_ragged, -(-rounds // RAGGED_PART)))
        for (name, mlp), found in zip(group.items(), beside(run_dense, sparse_passes(group, dy_BTD), x_BTD, turns))
    ]
    return {
        "spec": name,
        "dtype": model.compute_dtype,
        "tokens": cfg.tokens_per_step,
        "experts": model.experts.number,
        "chosen": model.experts.chosen,
        "mlp_dim": model.experts.mlp_dim,
        "dense_dim": model.experts.active_dim,
        "layers": layers,
        "devices": f"1 x {device.device_kind}",
        "date": datetime.date.today().isoformat(),
        **run_info(),
    }


def make_sparse(model: LlamaConfig, plan: ParallelPlan, seed: int) -> SparseMlp:
    """Returns a newly initialized mixture-of-experts layer."""
    assert model.experts is not None, "measure_experts() refuses other models"
    rngs, shared = nnx.Rngs(params=seed), None
    if model.experts.shared_dim:
        shared = LlamaMlp(model, model.experts.shared_dim, rngs=rngs, plan=plan)
    return SparseMlp(model, rngs=rngs, plan=plan, shared=shared)


def sparse_passes(group: Mapping[str, SparseMlp], dy_BTD: jax.Array) -> list[Pass]:
    """Returns pass_of() for each layer."""
    text_BT = jnp.ones(dy_BTD.shape[:2], jnp.int32)
    return [pass_of(mlp, lambda mlp, x_BTD: mlp(x_BTD, text_BT), dy_BTD) for mlp in group.values()]


def pass_of(mlp: nnx.Module, call: Callable, dy_BTD: jax.Array) -> Pass:
    """Returns a jitted function x_BTD -> (y_BTD, gradients, metrics). `call(mlp, x_BTD)` returns (y_BTD, metrics)."""
    graphdef, params = nnx.split(mlp)

    @jax.jit
    def run(params, x_BTD, dy_BTD):
        forward = lambda params, x_BTD: call(nnx.merge(graphdef, params), x_BTD)
        y_BTD, pull, metrics = jax.vjp(forward, params, x_BTD, has_aux=True)
        return y_BTD, pull(dy_BTD), metrics

    return lambda x_BTD: run(params, x_BTD, dy_BTD)


def beside(run_dense: Pass, passes: list[Pass], x_BTD: jax.Array, turns: int) -> list[dict[str, Any]]:
    """Times the passes alternately with the dense pass. Returns turns, seconds, ratio and quartiles for each."""
    seconds_by_turn = []
    for _ in range(WARM_TURNS + turns):
        runs = [lambda run=run: jax.block_until_ready(run(x_BTD)) for run in (run_dense, *passes)]
        seconds_by_turn.append([seconds_of(run)[0] for run in runs])
    dense, *others = zip(*seconds_by_turn[WARM_TURNS:])
    found = []
    for sparse in others:
        ratios = sorted(one / plain for one, plain in zip(sparse, dense, strict=True))
        found.append(
            {
                "turns": turns,
                "seconds": statistics.median(sparse),
                "dense_seconds": statistics.median(dense),
                "ratio": statistics.median(ratios),
                "ratio_quartiles": [ratios[turns // 4], ratios[-1 - turns // 4]],
            }
        )
    return found


def ragged_project(x_RC: jax.Array, w_ECO: jax.Array, counts_E: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Implements GroupedProject with jax.lax.ragged_dot."""
    return lax.ragged_dot(x_RC, w_ECO.astype(x_RC.dtype), counts_E)


def busiest_share(mlp: SparseMlp, x_BTD: jax.Array) -> float:
    """Returns the rows of the busiest expert over the mean."""
    expert_nk = mlp.routes(x_BTD.reshape(-1, x_BTD.shape[-1])).expert_nk
    counts_E = jnp.bincount(expert_nk.reshape(-1), length=mlp.experts.number)
    return float(jnp.max(counts_E) / jnp.mean(counts_E))


def pushed_router(mlp: SparseMlp, x_BTD: jax.Array) -> jax.Array | None:
    """Returns router weights [D, E] whose first expert has SKEWED times the mean rows, or None if there are none.

    Raises the logits of the first expert by a bias, the weight of the first channel of x, which must be 1. Leaves `mlp`
    with the last router that was tried."""
    router_DE = mlp.router[...].at[0].set(0)
    low, high = 0.0, MOST_PUSH
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        mlp.router[...] = router_DE.at[0, 0].set(middle)
        low, high = (low, middle) if busiest_share(mlp, x_BTD) > SKEWED else (middle, high)
    return mlp.router[...] if abs(busiest_share(mlp, x_BTD) / SKEWED - 1) < NEAR else None


def experts_lines(record: dict[str, Any]) -> list[str]:
    """Returns the record as lines of text."""
    rows = [["", "busiest over mean", "turns", "ms", "dense, ms", "over dense", "quartiles"]]
    for layer in record["layers"]:
        (low, high), ratio = layer["ratio_quartiles"], f"{layer['ratio']:.2f}"
        took = [f"{layer[key] * 1e3:.1f}" for key in ("seconds", "dense_seconds")]
        share, turns = f"{layer['busiest']:.2f}", str(layer["turns"])
        rows.append([layer["name"], share, turns, *took, ratio, f"{low:.2f} to {high:.2f}"])
    missing = [] if UNEVEN in [row[0] for row in rows] else [f"  {UNEVEN}: no router bias gives this load"]
    return [
        f"{record['spec']}, {record['dtype']}: a layer of {record['experts']} experts of {record['mlp_dim']}, "
        f"{record['chosen']} for each of {record['tokens']:,} tokens, forward and backward, alternating with a dense "
        f"layer of width {record['dense_dim']}; medians; {record['devices']}",
        *table(rows, right=range(1, 7), indent="  "),
        *missing,
        "  " + ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version),
    ]


@dataclasses.dataclass(frozen=True)
class ExpertsFlags(SpecFlags):
    """Flags of this benchmark."""

    rounds: int = flag(36, "timed turns of each layer", least=1)
    json: bool = flag(False, "one line of JSON")


@command(ExpertsFlags)
def main(arguments: Arguments) -> None:
    """Times the layers alternately."""
    name, cfg = read_config(arguments, usual="M")
    record = measure_experts(name, cfg, rounds=arguments.flags.rounds)
    show(record, experts_lines(record), as_json=arguments.flags.json)


if __name__ == "__main__":
    run_main(main)
