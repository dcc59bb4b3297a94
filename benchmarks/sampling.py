"""Sampling speed in tokens/s with a KV cache, compared with full forward passes.

  python -m benchmarks.sampling --spec=S --prompt_tokens=256 --num_tokens=64

Weights are random.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from benchmarks import run_main, show, use_devices
from jaxscale.config import RunConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.models.layers import split_model
from jaxscale.core.models.sharded import shard_model
from jaxscale.core.plan import ParallelSettings, resolve_plan
from jaxscale.kernels.matmul.project import with_matmul_precision
from jaxscale.program.machine_check import check_machine
from jaxscale.runtime.hosts.meshes import mesh_layout
from jaxscale.runtime.sampling.config import GREEDY
from jaxscale.runtime.sampling.generator import Engine, Generator, Timing
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system.exits import BadInput, print_stderr
from jaxscale.tools.qualify.step import SpecFlags, read_config
from jaxscale.tools.qualify.timing import seconds_of

FULL_PASSES = 8  # timed full passes; without a cache, every token needs one


def measure_sample(name: str, cfg: RunConfig, *, prompt_tokens: int, num_tokens: int, batch: int) -> dict[str, Any]:
    """Returns the record of --json: tokens/s of the prefill, of decoding with a cache, and of full forward passes.

    A full pass processes the length of the finished text, as a compiled program without a cache does for every token.
    Weights are random. Raises BadInput for a text longer than the model's maximum length.
    """
    check_machine(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, name="synthetic")))  # no data are read
    longest, limit = prompt_tokens + num_tokens, cfg.model.max_seq_len
    if limit is not None and longest > limit:
        raise BadInput(f"--prompt_tokens={prompt_tokens} and --num_tokens={num_tokens} are more than {limit}")
    plan = resolve_plan(cfg.model, make_mesh(cfg.mesh), ParallelSettings(cfg.rules))
    sharded = shard_model(cfg.model, plan, cfg.lora)
    init = lambda key: split_model(sharded.init(key))[1]
    params = jax.jit(init, out_shardings=sharded.shardings)(jax.random.key(cfg.seed))
    engine = Engine(sharded, batch=batch, longest=longest, say=print_stderr)
    generator = Generator(engine, params)
    rng = np.random.default_rng(cfg.seed)
    prompts = rng.integers(0, cfg.model.vocab_size, (engine.batch, prompt_tokens)).tolist()
    timings: list[Timing] = []
    for _ in range(3):  # the first call also compiles
        for _ in generator.generate(prompts, GREEDY, num_tokens):
            pass
        assert generator.timing is not None, "generate() has finished"
        timings.append(generator.timing)
    best = max(timings, key=lambda timing: timing.decode_rate)
    pass_seconds = time_full_pass(engine, params, rng.integers(0, cfg.model.vocab_size, (engine.batch, longest)))
    return {
        "sys": "jaxscale",
        "spec": name,
        "dtype": cfg.model.compute_dtype,
        "devices": f"{sharded.mesh.size} x {jax.devices()[0].device_kind}",
        "mesh": mesh_layout(sharded.mesh),
        "rows": engine.batch,
        "prompt_tokens": prompt_tokens,
        "num_tokens": num_tokens,
        "prefill_tok_s": round(best.prefill_rate, 1),
        "cached_tok_s": round(best.decode_rate, 1),
        "uncached_tok_s": round(engine.batch / pass_seconds, 1),
        "ratio": round(best.decode_rate * pass_seconds / engine.batch, 2),
        "compile_s": round(sum(timing.compile_seconds for timing in timings), 2),
    }


def time_full_pass(engine: Engine, params: Any, tokens_BT: np.ndarray) -> float:
    """Returns the seconds of a compiled forward pass over whole rows to their last logits, the fastest of several."""
    specs, rows = engine.sharded.specs, engine.rows_spec

    def logits(params: Any, tokens_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
        return engine.read_prompts(params, tokens_BT, lengths_B)[1]

    precise = with_matmul_precision(engine.sharded.cfg.matmul_precision, logits)  # same precision as with the cache
    call = jax.jit(engine.sharded.plan.batch_axes.shard_map(precise, (specs, rows, rows), rows))
    place = jax.sharding.NamedSharding(engine.sharded.mesh, rows)
    tokens_BT = jax.device_put(tokens_BT.astype(np.int32), place)
    lengths_B = jax.device_put(np.full(len(tokens_BT), tokens_BT.shape[1], np.int32), place)
    run = lambda: jax.block_until_ready(call(params, tokens_BT, lengths_B))
    run()  # compiles
    return min(seconds_of(run)[0] for _ in range(FULL_PASSES))


def sample_lines(record: dict[str, Any]) -> list[str]:
    """Returns the record as lines of text."""
    return [
        f"{record['spec']}, {record['dtype']}, {record['devices']} ({record['mesh']}): {record['rows']} rows, "
        f"{record['prompt_tokens']} prompt tokens and {record['num_tokens']} new tokens",
        f"  prefill            {record['prefill_tok_s']:>12,.1f} tokens/s",
        f"  decode, cached     {record['cached_tok_s']:>12,.1f} tokens/s",
        f"  decode, uncached   {record['uncached_tok_s']:>12,.1f} tokens/s; cached: {record['ratio']:,.2f} times",
        f"  compiled in        {record['compile_s']:>12,.1f} s",
    ]


@dataclasses.dataclass(frozen=True)
class SamplingFlags(SpecFlags):
    """Flags of this benchmark."""

    prompt_tokens: int = flag(256, "tokens of each prompt", least=1)
    num_tokens: int = flag(64, "tokens sampled after each prompt", least=1)
    rows: int = flag(1, "prompts in a batch", least=1)
    devices: int | None = flag(None, "simulated CPU devices", "8", least=1)
    json: bool = flag(False, "one line of JSON")


@command(SamplingFlags)
def main(arguments: Arguments) -> None:
    """Times sampling with a cache and with full forward passes."""
    flags = arguments.flags
    use_devices(flags.devices)
    sizes = dict(prompt_tokens=flags.prompt_tokens, num_tokens=flags.num_tokens, batch=flags.rows)
    record = measure_sample(*read_config(arguments), **sizes)
    show(record, sample_lines(record), as_json=flags.json)


if __name__ == "__main__":
    run_main(main)
