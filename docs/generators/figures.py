"""The numbers of the explanation pages, each computed by the code that trains and plans: name -> a function of nothing.

A page has {{ name }} where the number goes. None is typed into a page, so none can be stale.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from generators import by_hand, timelines, zigzag
from generators.by_hand import FLOAT32, MIXED, NO_MASTER
from generators.scaling import HOFFMANN
from generators.words import table
from jaxscale import schema, units
from jaxscale.config import RunConfig
from jaxscale.core.config import GuardConfig, LossScaleConfig
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.shardings import RULES
from jaxscale.kernels.attention import resolve_attention
from jaxscale.kernels.config import AttentionNeeds
from jaxscale.kernels.hardware import CHIPS, Chip
from jaxscale.settings import config_file
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.planning import cost, scaling
from jaxscale.tools.planning.placeholder_devices import open_machine
from jaxscale.tools.planning.plan import PlanOptions, make_plan
from jaxscale.tools.planning.published_mfu import ROWS, published_mfu, published_rows
from jaxscale.tools.planning.run_plan import RunPlan
from jaxscale.tools.planning.speed import recomputed_flops

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GPT3 = 175e9  # parameters, rounded as the question has it; arXiv:2005.14165 table 2.1
CARD = CHIPS["NVIDIA A100-SXM4-80GB"]
GUARD, LOSS_SCALE = GuardConfig(), LossScaleConfig()
LLAMA_7B = LlamaConfig(vocab_size=32_768, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=32, head_dim=128,
                       mlp_dim=11_008, remat="full")  # fmt: skip
LONG = (4096, 8192)  # tokens of a row for which attention is compiled


def gigabytes(num_bytes: float) -> str:
    """'1,750 GB', '4.38 GB'."""
    number = num_bytes / 1e9
    return f"{number:,.0f} GB" if number >= 100 else f"{number:.3g} GB"


def dollars(amount: float) -> str:
    """'$0.19M', '$922,000'."""
    return f"${amount / 1e6:.3g}M" if amount >= 1e6 else f"${float(f'{amount:.3g}'):,.0f}"


def between(values: cost.Range, of: Callable[[float], str]) -> str:
    """'low to high'."""
    return f"{of(values.low)} to {of(values.high)}"


def seconds(value: float) -> str:
    """'0.238 s'."""
    return f"{value:.3g} s"


@functools.cache
def plan_of(name: str, machine: str, network: float = 1.0, **settings: str) -> RunPlan:
    """The plan of a shipped config; network: of the machine's own rate between hosts."""
    overrides = {key.replace("__", "."): value for key, value in settings.items()}
    topology = open_machine(machine)
    slower = (topology.chip.dcn_bandwidth or 0.0) * network or None
    topology = dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, dcn_bandwidth=slower))
    cfg = config_file.load_config(f"{ROOT}/configs/{name}.py", overrides)
    return make_plan(cfg, topology, PlanOptions(config_name=name))


def state_of(plan: RunPlan) -> float:
    """Bytes of a device that are no activations."""
    return sum(row.num_bytes for row in plan.device.memory if row.kind != "activations")


def layouts() -> str:
    """What a device of eight holds and sends in a step of 7B, by layout."""
    rows = []
    for mesh, rules, what in (
        ('{"data": 8}', "zero1", "data"),
        ('{"fsdp": 8}', "zero1", "fsdp, ZeRO-1"),
        ('{"fsdp": 8}', "zero2", "fsdp, ZeRO-2"),
        ('{"fsdp": 8}', "zero3", "fsdp, ZeRO-3"),
        ('{"tensor": 8}', "zero3", "tensor"),
    ):
        plan = plan_of("7b", "h100:1x8", mesh=mesh, rules=rules, batch_tokens="64 rows")
        by_kind = {row.kind: gigabytes(row.num_bytes) for row in plan.device.memory}
        kinds = [by_kind[kind] for kind in ("parameters", "moments", "gradients")]
        rows.append([what, *kinds, gigabytes(state_of(plan)), seconds(plan.time.speed.link_seconds)])
    return table(["mesh of 8 H100", "parameters", "moments", "gradients", "total", "communication, lower bound"], rows)


def rule_tables() -> str:
    """Where each logical axis of a parameter lives, from core/shardings.py."""
    axes = [axis for axis in RULES["zero3"].params if not axis.startswith("act_")]
    cell = lambda place: "" if place is None else f"`{place}`"
    rows = [
        [
            f"`{axis}`",
            *(cell(RULES[rule].params[axis]) for rule in ("zero1", "zero3")),
            cell(RULES["zero1"].moments[axis]),
        ]
        for axis in axes
    ]
    return table(["axis", "parameters, `zero1`", "parameters, `zero3`", "moments, all rules"], rows)


@functools.cache
def running_sum(dtype: str, values: str) -> float:
    """A sum that is kept in a type, one term after the other. values: ones, or gradients that are drawn."""
    terms = np.ones(4096) if values == "ones" else np.random.default_rng(0).uniform(0, 1, 4096)
    add = lambda total, term: (total + term, None)
    total, _ = jax.lax.scan(add, jnp.zeros((), dtype), jnp.asarray(terms, dtype))
    return float(total)


def sums() -> str:
    """What is left of sums of 4,096 terms in each type."""
    true = float(np.random.default_rng(0).uniform(0, 1, 4096).sum())
    rows = [
        [dtype, f"{running_sum(dtype, 'ones'):,.0f}", f"{running_sum(dtype, 'drawn'):,.1f}",
         f"{1 - running_sum(dtype, 'drawn') / true:.2%}"]
        for dtype in ("float32", "bfloat16", "float16")
    ]  # fmt: skip
    return table(["accumulated in", "4,096 ones", f"4,096 draws from 0 to 1 (true: {true:,.1f})", "lost"], rows)


def types() -> str:
    """What types reach, and how fine they are."""
    names = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    rows = [
        [name, f"{float(info.max):.3g}", f"{float(info.tiny):.2g}", f"2^{int(np.log2(float(info.eps)))}"]
        for name, info in ((name, jnp.finfo(name)) for name in names)
    ]
    return table(["type", "largest", "smallest normal", "step above 1"], rows)


@functools.cache
def attention_bytes(name: str, length: int) -> int:
    """Temporary memory of attention and its gradient, one row and one head of 128, as compiled here for a CPU."""
    attend, _ = resolve_attention(name, "cpu", AttentionNeeds(head_dim=128, dtype="bfloat16"))
    rows = jax.ShapeDtypeStruct((1, length, 1, 128), jnp.bfloat16)
    loss = lambda q, k, v, segments: attend(q, k, v, segments).astype(jnp.float32).sum()
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    memory = program.lower(rows, rows, rows, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile().memory_analysis()
    return memory.temp_size_in_bytes


def attention_table() -> str:
    """Both forms at both lengths."""
    rows = [
        [name, *(f"{attention_bytes(name, length) / 2**20:,.0f} MiB" for length in LONG)]
        for name in ("xla", "blockwise")
    ]
    return table(["`model.attention`", *(f"{length:,} tokens" for length in LONG)], rows)


def bought(chip: Chip, budget: float, mfu: float) -> scaling.Alternative:
    """The compute-optimal model for so many dollars at the chip's list price."""
    peak = chip.peak_flops * chip.devices_per_chip
    flops = cost.flops_for_dollars(budget, chip.price.dollars_per_hour, peak, mfu, cost.GOODPUT)
    return scaling.lowest_alternative(flops)


def ten_million() -> str:
    """What ten million dollars buy on each chip with a price and a published MFU."""
    rows = []
    for chip in CHIPS.values():
        if chip.price is None or not published_rows(chip):
            continue
        mfu = published_mfu(chip)[0]
        low, high = (bought(chip, 1e7, share) for share in mfu)
        rows.append([
            chip.name,
            f"${chip.price.dollars_per_hour:.2f} ({chip.price.date})",
            f"{1e7 / chip.price.dollars_per_hour / 1e6:.3g}M",
            f"{low.flops:.2e} to {high.flops:.2e}",
            f"{units.count(round(low.params))} to {units.count(round(high.params))}",
            f"{units.count(round(low.tokens))} to {units.count(round(high.tokens))}",
        ])  # fmt: skip
    head = ["chip", "list price per hour", "chip-hours", "FLOPs", "parameters", "tokens"]
    return table(head, rows)


def reached_table() -> str:
    """What published runs reached of the peak, a line for each."""
    share = lambda row: f"{row.low:.1%}" if row.low == row.high else f"{row.low:.1%} to {row.high:.1%}"
    kind = lambda row: "MoE" if row.mixture else "dense"
    rows = [[row.chip, row.run, kind(row), share(row), row.source] for row in ROWS]
    return table(["chip", "run", "model", "MFU", "source"], rows)


def lowest_params(flops: float, law: scaling.Terms) -> float:
    """N where the law is lowest for so many operations: its slope in N along 6 N D = C is zero there."""
    both = law.alpha + law.beta
    return (law.alpha * law.A / (law.beta * law.B)) ** (1 / both) * (flops / 6) ** (law.beta / both)


def valley(factor: float, flops: float = 6e23) -> float:
    """Nats a token that so many times the best size costs, by the refit."""
    best = lowest_params(flops, scaling.BESIROGLU)
    at = lambda params: scaling.predicted_loss(params, flops / scaling.train_flops(params, 1))
    return at(factor * best) - at(best)


def published_runs() -> str:
    """Days of A100 that published amounts of computation take, at the whole peak and at what runs reach."""
    runs = (
        ("GPT-3 (arXiv:2005.14165, table D.1)", 3.14e23),
        ("Llama 2 70B (arXiv:2307.09288), 6 N D", scaling.train_flops(70e9, 2e12)),
        ("Llama 3 405B (arXiv:2407.21783), 6 N D", scaling.train_flops(405e9, 15.6e12)),
    )
    low, high = published_mfu(CARD)[0]
    days = lambda flops, mfu: f"{float(f'{by_hand.device_days(flops, CARD.peak_flops, mfu):.3g}'):,.0f}"
    rows = [
        [name, f"{flops:.2e}", days(flops, 1.0), f"{days(flops, high)} to {days(flops, low)}"] for name, flops in runs
    ]
    return table(["run", "FLOPs", "A100-days at peak FLOP/s", f"at {low:.0%} to {high:.0%} MFU"], rows)


def setting_count(cls: type) -> str:
    """How many settings there are."""
    return str(len(settings_help_of(cls)))


@functools.cache
def settings_help_of(cls: type) -> tuple[str, ...]:
    """Their names."""
    return tuple(name for name, *_ in schema.describe(cls))


zero = lambda stage: by_hand.bytes_of_device(70e9, tensor=8, pipeline=4, zero_stage=stage, zero_devices=8)
seven = lambda network=1.0: plan_of("7b", "h100:64x8", network)
no_master = lambda: by_hand.state_bytes(GPT3, NO_MASTER) - NO_MASTER.grads * GPT3  # the question leaves gradients out
remade = lambda: recomputed_flops(LLAMA_7B, 4096) / LLAMA_7B.flops_per_token(4096)
best_of = scaling.optimal_alternative
scores = lambda length, layers, heads: 2 * length**2 * layers * heads  # bytes: one bfloat16 for each pair

FIGURES: dict[str, Callable[[], str]] = {
    "run_settings": lambda: setting_count(RunConfig),
    "recipe_settings": lambda: setting_count(PrepareConfig),
    "tokens_per_param": lambda: f"{scaling.TOKENS_PER_PARAM:g}",
    "smallest_fitted": lambda: units.count(round(scaling.SMALLEST_FITTED)),
    # memory of GPT-3
    "gpt3_weights": lambda: gigabytes(NO_MASTER.weights * GPT3),
    "gpt3_moments": lambda: gigabytes(NO_MASTER.moments * GPT3),
    "gpt3_both": lambda: gigabytes(no_master()),
    "gpt3_cards": lambda: str(by_hand.devices_for(no_master(), CARD.hbm_bytes)),
    "gpt3_gradients": lambda: gigabytes(MIXED.grads * GPT3),
    "gpt3_master": lambda: gigabytes(MIXED.master * GPT3),
    "gpt3_state": lambda: gigabytes(by_hand.state_bytes(GPT3)),
    "gpt3_state_cards": lambda: str(by_hand.devices_for(by_hand.state_bytes(GPT3), CARD.hbm_bytes)),
    "bytes_mixed": lambda: " + ".join(f"{part:g}" for part in MIXED) + f" = {sum(MIXED):g}",
    "bytes_float32": lambda: f"{FLOAT32.weights:g} + {FLOAT32.grads:g} + {FLOAT32.moments:g} = {sum(FLOAT32):g}",
    "config_175b_params": lambda: f"{plan_of('175b', 'h100:128x8').work.params:,}",
    "config_175b_state": lambda: gigabytes(state_of(plan_of("175b", "h100:128x8"))),
    "config_175b_activations": lambda: gigabytes(plan_of("175b", "h100:128x8").device.memory[-1].num_bytes),
    "config_175b_links": lambda: seconds(plan_of("175b", "h100:128x8").time.speed.link_seconds),
    "config_175b_compute": lambda: seconds(plan_of("175b", "h100:128x8").time.speed.compute_seconds),
    # parallelism
    "layouts_of_7b": layouts,
    "rule_tables": rule_tables,
    "split_70b": lambda: gigabytes(by_hand.bytes_of_device(70e9, tensor=8, pipeline=4)),
    "split_70b_zero1": lambda: gigabytes(zero(1)),
    "split_70b_zero3": lambda: gigabytes(zero(3)),
    "state_7b": lambda: gigabytes(by_hand.state_bytes(7e9)),
    "nvlink": lambda: gigabytes(CHIPS["NVIDIA H100 80GB HBM3"].ici_bandwidth),
    "network": lambda: gigabytes(CHIPS["NVIDIA H100 80GB HBM3"].dcn_bandwidth),
    "zigzag_drawing": zigzag.drawing,
    "zigzag_shares": zigzag.shares,
    # pipelines
    "drawing_1f1b": lambda: timelines.timeline("1f1b"),
    "drawing_interleaved": lambda: timelines.timeline("interleaved"),
    "drawing_zero_bubble": lambda: timelines.timeline("zero_bubble"),
    "drawing_gpipe": lambda: timelines.timeline("gpipe"),
    "bubbles": timelines.bubbles,
    "stages_line": timelines.told,
    "backward_passes": lambda: f"{timelines.BACKWARD:g}",
    "passes_twice": lambda: f"{timelines.redone_turns()}",
    "bubble_8_16": lambda: timelines.bubble("1f1b", 8, 1, 16),
    "zero_bubble_8_16": lambda: timelines.bubble("zero_bubble", 8, 1, 16),
    # precision
    "table_of_types": types,
    "table_of_sums": sums,
    "bfloat16_stops_at": lambda: f"{running_sum('bfloat16', 'ones'):g}",
    "bfloat16_max": lambda: f"{float(jnp.finfo('bfloat16').max):.3g}",
    "float16_max": lambda: f"{float(jnp.finfo('float16').max):,.0f}",
    "first_loss_scale": lambda: f"{LOSS_SCALE.initial:,.0f}",
    "growth_interval": lambda: f"{LOSS_SCALE.growth_interval:,}",
    "weight_after_update": lambda: f"{float(jnp.bfloat16(1) + jnp.bfloat16(3e-4)):g}",
    "weight_after_update_float32": lambda: f"{float(jnp.float32(1) + jnp.float32(3e-4)):.5g}",
    # links at 512 chips
    "links_compute": lambda: seconds(seven().time.speed.compute_seconds),
    "links_step": lambda: between(seven().time.speed.step_seconds, seconds),
    "links_network": lambda: seconds(seven().time.speed.link_seconds),
    "links_slow": lambda: seconds(seven(0.1).time.speed.link_seconds),
    "links_slow_step": lambda: between(seven(0.1).time.speed.step_seconds, seconds),
    "links_slow_mfu": lambda: between(seven(0.1).time.speed.mfu, lambda share: f"{share:.1%}"),
    "links_mfu": lambda: between(seven().time.speed.mfu, lambda share: f"{share:.0%}"),
    "links_dollars": lambda: between(seven().money.dollars, dollars),
    "links_slow_dollars": lambda: between(seven(0.1).money.dollars, dollars),
    "links_gradients": lambda: gigabytes(4 * seven().work.params),
    # attention, rematerialisation, scaling, spikes
    "scores_of_a_head": lambda: f"{scores(8192, 1, 1) / 1e6:.0f} MB",
    "scores_of_70b": lambda: gigabytes(scores(8192, 80, 64)),
    "attention_table": attention_table,
    "remat_share": lambda: f"{remade():.0%}",
    "remat_by_hand": lambda: f"{(scaling.train_flops(1, 1) + 2) / scaling.train_flops(1, 1) - 1:.0%}",
    "optimal_7b": lambda: units.count(round(scaling.optimal_tokens(7e9))),
    "optimal_70b": lambda: units.count(round(scaling.optimal_tokens(70e9))),
    "optimal_6e23": lambda: f"{best_of(6e23).params / 1e9:.1f}B on {best_of(6e23).tokens / 1e12:.2f}T",
    "optimal_gpt3": lambda: f"{best_of(3.14e23).params / 1e9:.0f}B on {best_of(3.14e23).tokens / 1e12:.2f}T",
    "over_7b": lambda: f"{1e12 / scaling.optimal_tokens(7e9):.1f}",
    "valley_half": lambda: f"{valley(0.5):.3f}",
    "valley_double": lambda: f"{valley(2):.3f}",
    "valley_quarter": lambda: f"{valley(0.25):.3f}",
    "lowest_refit": lambda: f"{6e23 / 6 / lowest_params(6e23, scaling.BESIROGLU) ** 2:.0f}",
    "lowest_first_fit": lambda: f"{6e23 / 6 / lowest_params(6e23, HOFFMANN) ** 2:.0f}",
    "double_growth": lambda: f"{best_of(2e24).params / best_of(1e24).params:.2f}",
    "spike_ratio": lambda: f"{GUARD.spike_ratio:g}",
    "guard_window": lambda: f"{GUARD.window_steps}",
    "max_grad_norm": lambda: f"{GUARD.max_grad_norm:g}",
    "max_spikes_in_row": lambda: f"{GUARD.max_spikes_in_row}",
    # money
    "ten_million": ten_million,
    "published_runs": published_runs,
    "reached": reached_table,
    "goodput": lambda: f"{cost.GOODPUT:.0%}",
    "failures_16384": lambda: f"{cost.mean_seconds_between_failures(16_384) / 3600:.1f}",
    "seven_on_1t_hours": lambda: units.count(
        round(by_hand.device_days(scaling.train_flops(7e9, 1e12), CARD.peak_flops, 0.4) * 24)
    ),
}  # fmt: skip
