"""Times the compiled training step on random tokens, for `jaxscale bench step`."""

import dataclasses
import datetime
import math
import os
import statistics
import time
from typing import Any

import jax

from jaxscale import schema, units
from jaxscale.build import Program, make_program
from jaxscale.config import RunConfig
from jaxscale.core.batch import Batch
from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.llama import HEAD_STD
from jaxscale.core.models.lora_mup_config import mup_scales
from jaxscale.kernels.hardware import find_chip
from jaxscale.program.budget import resolve_budget
from jaxscale.program.machine_check import check_machine
from jaxscale.runtime.data.rows import SyntheticRows
from jaxscale.runtime.data.stacking import stack_rows
from jaxscale.runtime.hosts.meshes import local_rows, put_rows
from jaxscale.runtime.monitor.machine import memory_metrics
from jaxscale.runtime.monitor.runinfo import run_info
from jaxscale.settings import config_file
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.config_file import config_name
from jaxscale.system.exits import BadInput
from jaxscale.system.process import has_huge_pages
from jaxscale.tools.qualify.products import product_width, time_products
from jaxscale.tools.qualify.timing import CompileLog

# Models that are easy to reproduce in plain JAX, PyTorch and other frameworks: Llama with untied embeddings, AdamW and
# gradients clipped to norm 1. M is a Mixtral with experts half as wide as the MLP of S.
S_MODEL = dict(vocab_size=8192, num_layers=8, embed_dim=512, num_heads=8, num_kv_heads=8, mlp_dim=1536)
T_MODEL = dict(vocab_size=256, num_layers=4, embed_dim=256, num_heads=4, num_kv_heads=4, mlp_dim=768)
M_MODEL = S_MODEL | dict(num_layers=4, experts=dict(number=8, chosen=2, mlp_dim=768))
SPECS = {
    "S": dict(seq_len=512, batch_tokens=8 * 512, model=S_MODEL),
    "T": dict(seq_len=256, batch_tokens=16 * 256, model=T_MODEL),
    "M": dict(seq_len=512, batch_tokens=8 * 512, model=M_MODEL),
}
COMMON = {
    "train_tokens": "100000 steps",
    "model.name": "llama",
    "model.head_dim": 64,
    "model.compute_dtype": "float32",
    "optim.decay": "constant",
    "optim.peak_lr": 3e-4,
    "optim.warmup_tokens": 0,
    "data.name": "synthetic",
}
LONGEST_DATA = 10**12  # tokens per epoch for budgets in epochs; does not affect the step time
LOSSES = ("loss0", "lossN", "log_vocab", "logit_variance")
NEAR_NATS = 0.5  # tolerance of the expected loss of an untrained model on random tokens


@dataclasses.dataclass(frozen=True)
class SpecFlags:
    """Flags for read_config()."""

    spec: str | None = flag(
        None,
        "S: 8 layers, width 512, vocabulary 8192, 8 x 512 tokens; T: 4 layers, width 256, vocabulary 256, "
        "16 x 256 tokens; both Llama, untied embeddings, AdamW, gradient clipping; M: Mixtral, 4 layers, width 512, "
        "8 experts of width 768, top 2, vocabulary 8192, 8 x 512 tokens",
        "S",
    )
    config: str = flag("", "config of a run, instead of --spec", "FILE")
    settings: dict[str, str] = flag(
        dict, "sets any setting, such as --config.train.num_microbatches=4", "VALUE", name="config.NAME"
    )
    dtype: str | None = flag(None, "compute dtype", "float32")


def read_config(arguments: Arguments, *, usual: str = "S") -> tuple[str, RunConfig]:
    """Returns (name, RunConfig). usual: default of --spec. Raises BadInput if --config and --spec are both set."""
    flags, overrides = arguments.flags, dict(arguments.overrides)
    if flags.dtype:
        overrides["model.compute_dtype"] = flags.dtype
    if arguments.config:
        if flags.spec:
            raise BadInput("--spec and --config cannot be combined; pass only one")
        return config_name(arguments.config), config_file.load_config(arguments.config, overrides)
    spec = flags.spec or usual
    if spec not in SPECS:
        raise BadInput(f"--spec={spec} is unknown; pass {units.or_list(list(SPECS))}, or --config=FILE")
    return spec, schema.from_dict(RunConfig, schema.merge(SPECS[spec], COMMON | overrides))


def measure_step(name: str, cfg: RunConfig, *, steps: int, warmup: int) -> dict[str, Any]:
    """Times `steps` steps, after a first step and `warmup` steps. Returns the record for --json.

    A step transfers one batch to the devices, runs the compiled step and transfers the loss to the host. tok_s is
    tokens/s at the median step time, *_s are seconds and *_mb are MiB. cpu_s is the CPU time of a step over all
    threads, which other programs on the machine affect less than step_s.
    """
    check_machine(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, name="synthetic")))  # no data is read
    with CompileLog() as log:
        program = make_program(cfg, resolve_budget(cfg, epoch_tokens=LONGEST_DATA))
        cfg = program.cfg  # 'auto' dtypes are resolved
        runner = StepRunner(program, program.train_step, 1 + warmup + steps)
        hits = log.from_cache
        runner.run(1)
        first_step_s, from_cache = process_age(), log.from_cache > hits
        runner.run(warmup + steps)
        compiled = log.seconds.get(program.train_step.__name__, [])
    losses, seconds, cpu_seconds = runner.losses, runner.seconds[1 + warmup :], runner.cpu_seconds[1 + warmup :]
    median = statistics.median(seconds)
    rate = cfg.tokens_per_step / median
    memory = memory_metrics([d.memory_stats() for d in jax.local_devices()])
    return {
        "sys": "jaxscale",
        "spec": name,
        "dtype": cfg.model.compute_dtype,
        "tok_s": round(rate, 1),
        "gflops": round(rate * cfg.model.flops_per_token(cfg.seq_len) / 1e9, 2),
        "product_gflops": product_gflops(cfg.model.compute_dtype),
        "mfu": utilisation(rate, cfg),
        "step_s": round(median, 5),
        "step_s_range": [round(pick(seconds), 5) for pick in (min, max)],
        "cpu_s": round(statistics.median(cpu_seconds), 4),
        "steps": steps,
        "warmup": warmup,
        "compile_s": round(sum(compiled), 2),
        "compiled_times": len(compiled),
        "compile_from_cache": from_cache,
        "first_step_s": None if first_step_s is None else round(first_step_s, 2),
        "rss_mb": round((memory["host_peak_bytes"] or 0) / 2**20),
        "device_peak_mb": memory["device_peak_bytes"] and round(memory["device_peak_bytes"] / 2**20),
        "loss0": round(losses[0], 4),
        "lossN": round(losses[-1], 4),
        **describe_program(program),
    }


def describe_program(program: Program) -> dict[str, Any]:
    """Returns the model size, batch size and machine, for the record of a measurement."""
    cfg = program.cfg
    return {
        "log_vocab": round(math.log(cfg.model.vocab_size), 4),
        "logit_variance": round(logit_variance(cfg.model), 4),
        "params": cfg.model.num_params,
        "active_params": cfg.model.active_params,
        "rows": cfg.rows_per_step,
        "seq_len": cfg.seq_len,
        "attention": program.plan.attention.name,
        "scan_layers": cfg.model.scan_layers,
        "num_microbatches": cfg.train.num_microbatches,
        "devices": f"{program.mesh.size} x {jax.devices()[0].device_kind}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "huge_pages": has_huge_pages(),
        "date": datetime.date.today().isoformat(),
        **run_info(),
    }


def product_gflops(dtype: str) -> float:
    """Returns the matmul GFLOP/s of all devices. Simulated devices share a CPU, so they count as one device."""
    device = jax.local_devices()[0]
    seconds, flops = time_products(device, product_width(device), dtype)
    num_chips = 1 if device.platform == "cpu" else jax.device_count()
    return round(num_chips * seconds.rate(flops)[0] / 1e9, 1)


class StepRunner:
    """Runs training steps on random batches, waits for each step, and records times and losses."""

    def __init__(self, program: Program, train_step: Any, most_steps: int):
        self.program, self.train_step = program, train_step
        self.state = jax.block_until_ready(program.init())
        # batches do not repeat, because the model would learn them and the loss is checked
        self.batches = iter(random_batches(program, most_steps))
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []  # CPU time over all threads
        self.losses: list[float] = []

    def run(self, steps: int) -> None:
        """Runs `steps` steps."""
        for _ in range(steps):
            batch = next(self.batches)
            began, cpu_began = time.perf_counter(), time.process_time()
            self.state, metrics = self.train_step(self.state, place(self.program, batch))
            loss = float(metrics["loss"])
            jax.block_until_ready(self.state)
            self.seconds.append(time.perf_counter() - began)
            self.cpu_seconds.append(time.process_time() - cpu_began)
            self.losses.append(loss)


def random_batches(program: Program, number: int) -> list[Batch]:
    """Returns this process's part of `number` batches. Each sequence is one document of uniform random tokens."""
    cfg = program.cfg
    source = SyntheticRows(seq_len=cfg.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.seed)
    rows = local_rows(program.batch_sharding, (cfg.rows_per_step, cfg.seq_len))
    return [stack_rows([source[n * cfg.rows_per_step + row] for row in rows]) for n in range(number)]


def place(program: Program, batch: Batch) -> Batch:
    """Transfers a host batch to the devices."""
    rows = local_rows(program.batch_sharding, (program.cfg.rows_per_step, program.cfg.seq_len))
    return put_rows(batch, rows, program.cfg.rows_per_step, program.batch_sharding)


def utilisation(tokens_per_second: float, cfg: RunConfig) -> float | None:
    """Returns the model FLOPs utilization (MFU), or None if the peak FLOP/s of the chip are unknown."""
    chip = find_chip(jax.devices()[0].device_kind)
    if chip is None:
        return None
    flops_per_second = tokens_per_second * cfg.model.flops_per_token(cfg.seq_len)
    return round(flops_per_second / (chip.peak_flops * jax.device_count()), 4)


def process_age() -> float | None:
    """Returns the seconds since this process started (including imports and re-exec), or None without /proc."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            started = int(file.read().rpartition(")")[2].split()[19])  # field 22 of proc(5), in clock ticks
    except (OSError, ValueError, IndexError):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def logit_variance(model: AnyModelConfig) -> float:
    """Returns the variance of an untrained Llama's logits, assuming a normalized last hidden state."""
    return model.embed_dim * (HEAD_STD * mup_scales(model).output) ** 2


def loss_problem(first: float | None, last: float | None, log_vocab: float, variance: float = 0.0) -> str | None:
    """Returns an error message if a loss on random tokens is not near log(vocabulary), otherwise None."""
    low, high = log_vocab - NEAR_NATS, log_vocab + variance / 2 + NEAR_NATS
    for what, loss in (("first", first), ("last", last)):
        if loss is not None and not low < loss < high:
            return f"the {what} loss is {loss:.4g}, but random tokens should give {low:.4g} to {high:.4g}"
    return None


def step_lines(record: dict[str, Any]) -> list[str]:
    """Returns the record as lines of text."""
    low, high = record["step_s_range"]
    layers = "scanned" if record["scan_layers"] else "unrolled"
    first = "unknown" if record["first_step_s"] is None else f"{record['first_step_s']} s"
    mfu = "" if record["mfu"] is None else f", MFU {record['mfu']:.1%}"
    times = {1: "once", 2: "twice"}.get(record["compiled_times"], f"{record['compiled_times']} times")
    problem = loss_problem(*(record[name] for name in LOSSES))
    active = ""
    if record["active_params"] != record["params"]:  # a mixture of experts
        active = f" ({units.count(record['active_params'])} active per token, counted in FLOPs and MFU)"
    commit = record["git_commit"]
    return [
        f"{record['spec']}, {record['dtype']}: {record['rows']} x {record['seq_len']} random tokens per step, "
        f"{units.count(record['params'])} parameters{active}, layers {layers}, "
        f"{record['attention']} attention, {record['num_microbatches']} microbatch(es); "
        f"{record['devices']}, {record['cpus']} CPUs" + (", huge pages" if record["huge_pages"] else ""),
        f"  {record['tok_s']:,.0f} tokens/s, {record['gflops']:,.0f} GFLOP/s from the model's formula{mfu}; "
        f"matmuls alone reach {record['product_gflops']:,.0f} GFLOP/s on this machine",
        f"  step {record['step_s']:.4g} s, median of {record['steps']} ({low:.4g} to {high:.4g}); CPU time "
        f"{record['cpu_s']:.4g} s",
        f"  compile {record['compile_s']} s ({'' if record['compile_from_cache'] else 'not '}from the cache), "
        f"compiled {times}; first step finished {first} after process start",
        f"  peak memory {record['rss_mb']:,} MiB"
        + ("" if record["device_peak_mb"] is None else f", per device {record['device_peak_mb']:,} MiB"),
        f"  loss {record['loss0']} to {record['lossN']}, log(vocabulary) {record['log_vocab']}: {problem or 'sane'}",
        "  "
        + ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
        + f"; {'commit ' + commit if commit else 'no commit'}; {record['date']}",
    ]
