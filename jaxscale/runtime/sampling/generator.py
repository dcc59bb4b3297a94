"""Text generation, token by token, with a compiled prefill of the prompts and a compiled decode step for all rows.

Prompts of different lengths share a right-padded batch, in which every row has a separate position. The random numbers
of a row depend on the seed, the number of the row and the number of tokens drawn, but not on the batch or the mesh.

B batch  T position of a prompt  V vocab
"""

import collections
import dataclasses
import functools
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxscale import units
from jaxscale.core.axes.tensor_axis import make_tensor_axis
from jaxscale.core.models.model import unembed
from jaxscale.core.models.sharded import ShardedModel
from jaxscale.core.shardings import partition_spec, replicated
from jaxscale.kernels.matmul.project import with_matmul_precision
from jaxscale.runtime.sampling import kv_cache
from jaxscale.runtime.sampling.config import Sampling
from jaxscale.system.exits import BadInput

ENDED = -1  # replaces the token of a row that has ended
NOT_FINITE = -2  # replaces the token of a row with non-finite logits; raised as NotFinite, never yielded
MIN_PROMPT = 16  # shortest padded prompt length; longer lengths are a power of two times this
STEPS_IN_FLIGHT = 2  # decode steps in flight when a token is yielded, so that the device does not wait for the host


class NotFinite(BadInput):
    """Raised if the logits of the model are NaN or infinite, so that no token can be drawn."""


class DecodeState(NamedTuple):
    """Decoding state of all rows."""

    cache: kv_cache.Cache
    lengths_B: jax.Array  # int32: tokens in the cache
    last_B: jax.Array  # int32: the newest token, not in the cache yet
    ended_B: jax.Array  # bool
    drawn_B: jax.Array  # int32: tokens drawn so far
    number_B: jax.Array  # int32: number of the row, which selects its random numbers
    seen_BV: jax.Array | None  # bool: tokens in the text so far, if there is a repetition penalty
    seed: jax.Array  # uint32[]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times and token counts of one call of generate()."""

    compile_seconds: float
    prefill_seconds: float
    prompt_tokens: int
    decode_seconds: float
    decoded_tokens: int  # without the first token of each row, which is from the prefill

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second of prefill."""
        return self.prompt_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        """Decoded tokens per second, over all rows."""
        return self.decoded_tokens / max(self.decode_seconds, 1e-9)


class Engine:
    """Compiled programs of one model on a mesh, for `batch` sequences of at most `longest` tokens each.

    Stores no parameters, so it can also be used for a model in training. `num_ids` is the size of the tokenizer. Never
    draws larger ids, which pad the vocabulary, or ids in `never`. `say` logs compilation messages.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        *,
        batch: int,
        longest: int,
        num_ids: int | None = None,
        never: Sequence[int] = (),
        say: Callable[[str], None] = lambda line: None,
    ):
        cfg, limit = sharded.cfg, sharded.cfg.max_seq_len
        if cfg.kind != "decoder":
            raise BadInput(f"model.name={cfg.name!r} is not a decoder and cannot generate text; use llama or gpt2")
        if limit is not None and longest > limit:
            raise BadInput(f"a text of {longest} tokens exceeds model.max_seq_len={limit}; use fewer tokens")
        self.sharded, self.longest, self.say = sharded, longest, say
        self.batch = batch + -batch % sharded.plan.batch_axes.num_shards
        self.drawable_V = np.arange(cfg.vocab_size) < (num_ids or cfg.vocab_size)
        self.drawable_V[list(never)] = False
        self.slots = kv_cache.num_slots(sharded.plan.needs, longest)
        self.tensor = kv_cache.ReplicatedTensorAxis(sharded.mesh.shape["tensor"], make_tensor_axis(sharded.mesh).stages)
        heads = "channels" if cfg.latent_width else "kv_heads"  # latents are shared by all heads
        axes = ("layers", "act_batch", "act_seq", heads, "head_dim")
        self.cache_spec = partition_spec(axes, sharded.plan.rules.params)
        self.rows_spec = P(*partition_spec(("act_batch",), sharded.plan.rules.params))
        self.programs: dict[Any, Any] = {}

    def read_prompts(self, params: Any, tokens_BT: jax.Array, lengths_B: jax.Array):
        """Returns (Cache, float32[B, V] logits after the last token of each row) for the local shard."""
        recorder = kv_cache.CacheRecorder()
        model = self.sharded.merge(params, tensor=self.tensor, recorder=recorder)
        T = tokens_BT.shape[1]
        positions_BT = jnp.minimum(jnp.arange(T)[None], lengths_B[:, None] - 1)
        text_BT = (jnp.arange(T)[None] < lengths_B[:, None]).astype(jnp.int32)
        h_BTD = model.hidden(tokens_BT, positions_BT, text_BT)
        h_BD = jnp.take_along_axis(h_BTD, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
        return kv_cache.fill_cache(recorder.whole, lengths_B, self.slots), unembed(model, h_BD)

    def read_one(
        self, params: Any, cache: kv_cache.Cache, tokens_B: jax.Array, lengths_B: jax.Array
    ) -> tuple[kv_cache.Cache, jax.Array]:
        """Appends one token per row to the cache. Returns (cache, float32[B, V] logits after this token)."""
        recorder = kv_cache.CacheReader(
            cache, lengths_B, self.sharded.plan.needs, tuple(self.sharded.cfg.layer_stacks.values())
        )
        model = self.sharded.merge(params, tensor=self.tensor, recorder=recorder)
        ones_B1 = jnp.ones_like(tokens_B)[:, None]
        h_B1D = model.hidden(tokens_B[:, None], lengths_B[:, None], ones_B1)
        return recorder.extended(), unembed(model, h_B1D[:, 0])

    def draw(self, state: DecodeState, logits_BV: jax.Array, sampling: Sampling, stop_ids: tuple[int, ...]):
        """Draws one token per row. Returns (state, int32[B] of the token, ENDED or NOT_FINITE)."""
        broken_B = ~jnp.all(jnp.isfinite(logits_BV), axis=-1)
        logits_BV = jnp.where(self.drawable_V[None], logits_BV, -jnp.inf)
        row_key = lambda number, drawn: jax.random.fold_in(
            jax.random.fold_in(jax.random.key(state.seed), number), drawn
        )
        keys_B = jax.vmap(row_key)(state.number_B, state.drawn_B)
        next_B = choose(logits_BV, state.seen_BV, keys_B, sampling)
        ended_B = state.ended_B | (state.lengths_B >= self.longest)
        for stop in stop_ids:
            ended_B |= (next_B == stop) & ~broken_B  # the argmax of NaN is id 0, which may be a stop id
        if (seen_BV := state.seen_BV) is not None:
            seen_BV = seen_BV.at[jnp.arange(next_B.shape[0]), next_B].set(True)
        state = state._replace(last_B=next_B, ended_B=ended_B, drawn_B=state.drawn_B + 1, seen_BV=seen_BV)
        return state, jnp.where(ended_B, ENDED, jnp.where(broken_B, NOT_FINITE, next_B))

    @functools.cache  # noqa: B019 - as long as the engine lives
    def functions(self, sampling: Sampling, stop_ids: tuple[int, ...]) -> tuple[Callable, Callable]:
        """Returns jitted (prefill(params, tokens_BT, ...), decode(params, state)), both -> (state, tokens_B)."""
        sharded, rows = self.sharded, self.rows_spec
        cache, seen = kv_cache.Cache._make((self.cache_spec,) * 2), rows if sampling.depends_on_text else None
        state_spec = DecodeState._make((cache, rows, rows, rows, rows, rows, seen, P()))
        with_model_precision = functools.partial(with_matmul_precision, sharded.cfg.matmul_precision)

        def prefill(params: Any, tokens_BT, lengths_B, number_B, seed):
            B, T = tokens_BT.shape
            ended_B, lengths_B = lengths_B == 0, jnp.maximum(lengths_B, 1)
            seen_BV = None
            if sampling.depends_on_text:
                text_BT = jnp.arange(T)[None] < lengths_B[:, None]
                seen_BV = jnp.zeros((B, sharded.cfg.vocab_size), bool)
                seen_BV = seen_BV.at[jnp.arange(B)[:, None], tokens_BT].max(text_BT)
            cache, logits_BV = self.read_prompts(params, tokens_BT, lengths_B)
            zeros_B = jnp.zeros_like(lengths_B)
            state = DecodeState(cache, lengths_B, zeros_B, ended_B, zeros_B, number_B, seen_BV, seed)
            return self.draw(state, logits_BV, sampling, stop_ids)

        def decode(params: Any, state: DecodeState):
            cache, logits_BV = self.read_one(params, state.cache, state.last_B, state.lengths_B)
            state = state._replace(cache=cache, lengths_B=state.lengths_B + ~state.ended_B)
            return self.draw(state, logits_BV, sampling, stop_ids)

        shard_map, specs, out_specs = sharded.plan.batch_axes.shard_map, sharded.specs, (state_spec, rows)
        prefill = shard_map(with_model_precision(prefill), (specs, rows, rows, rows, P()), out_specs)
        decode = shard_map(with_model_precision(decode), (specs, state_spec), out_specs)
        sharding = functools.partial(jax.sharding.NamedSharding, sharded.mesh)
        shardings = jax.tree.map(sharding, state_spec, is_leaf=lambda leaf: isinstance(leaf, P))
        out = (shardings, replicated(sharded.mesh))
        return jax.jit(prefill, out_shardings=out), jax.jit(decode, donate_argnums=1, out_shardings=out)

    def compiled(self, params: Any, arguments: tuple, sampling: Sampling, stop_ids: tuple[int, ...]):
        """Returns (prefill, decode, compilation time in seconds) for arguments of these shapes."""
        began, length, key = time.monotonic(), arguments[0].shape[1], (sampling, stop_ids)
        prefill, decode = self.functions(sampling, stop_ids)
        if (*key, length) not in self.programs:
            rows = units.plural(self.batch, "row")
            self.say(f"compiling for {rows}, prompts of up to {length} tokens and texts of up to {self.longest}")
            lowered = prefill.lower(params, *arguments)
            self.programs[*key, length] = compiled = lowered.compile()
            with_sharding = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            state = jax.tree.map(with_sharding, lowered.out_info[0], compiled.output_shardings[0])
            if key not in self.programs:
                self.programs[key] = decode.lower(params, state).compile()
            self.say(f"compiled in {time.monotonic() - began:.1f} s")
        return self.programs[*key, length], self.programs[key], time.monotonic() - began


@dataclasses.dataclass
class Generator:
    """An engine together with the parameters of a model."""

    engine: Engine
    params: Any
    timing: Timing | None = None  # timing of the last call of generate()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sampling,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        seed: int = 0,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[np.ndarray]:
        """Yields int32[rows] in each step: the next token of every prompt, or -1 for a row that has ended.

        A row ends before a token of `stop_ids`, or when its text has `longest` tokens. `numbers` are folded into the
        random keys; the default is prompt_numbers(prompts). Raises NotFinite and the errors of check_prompts.
        """
        engine, self.timing = self.engine, None
        check_prompts(prompts, engine)
        numbers = prompt_numbers(prompts) if numbers is None else numbers
        arguments = self.shard_arguments(prompts, numbers, seed)
        prefill, decode, compile_seconds = engine.compiled(self.params, arguments, settings, tuple(stop_ids))
        began = time.monotonic()
        state, tokens_B = prefill(self.params, *arguments)
        pending, started, steps, written = collections.deque([tokens_B]), 1, 0, 0
        prefill_seconds = None
        while pending:
            while started < max_new_tokens and len(pending) <= STEPS_IN_FLIGHT:
                state, tokens_B = decode(self.params, state)
                pending.append(tokens_B)
                started += 1
            found_B = np.asarray(pending.popleft())[: len(prompts)]
            now = time.monotonic()
            if prefill_seconds is None:
                prefill_seconds, first = now - began, now
            else:
                written += int((found_B != ENDED).sum())
            steps += 1
            self.timing = Timing(compile_seconds, prefill_seconds, sum(map(len, prompts)), now - first, written)
            if (broken := np.flatnonzero(found_B == NOT_FINITE)).size:
                raise NotFinite(
                    f"the logits of token {steps} after prompt {broken[0] + 1} are not finite: the model's weights "
                    f"have diverged, or overflow {engine.sharded.cfg.compute_dtype}; use an older step, or float32"
                )
            if (found_B == ENDED).all():
                return
            yield found_B
            if steps >= max_new_tokens:
                return

    def shard_arguments(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], seed: int) -> tuple:
        """Returns the arguments of prefill, sharded over the mesh. Unused rows have length 0."""
        engine = self.engine
        length = prompt_length(max(map(len, prompts)), engine.longest)
        tokens_BT = np.zeros((engine.batch, length), np.int32)
        lengths_B, number_B = np.zeros(engine.batch, np.int32), np.zeros(engine.batch, np.int32)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, : len(prompt)] = prompt
            lengths_B[row], number_B[row] = len(prompt), numbers[row]
        rows = jax.sharding.NamedSharding(engine.sharded.mesh, engine.rows_spec)
        arrays = jax.device_put((tokens_BT, lengths_B, number_B), rows)
        return *arrays, jax.device_put(np.uint32(seed % 2**32), replicated(engine.sharded.mesh))


def filtered(logits_BV: jax.Array, seen_BV: jax.Array | None, sampling: Sampling) -> jax.Array:
    """Returns the logits to draw from, float32[B, V], with -inf for excluded tokens. `seen_BV`: tokens in the text."""
    logits_BV = logits_BV.astype(jnp.float32)
    if sampling.depends_on_text:
        assert seen_BV is not None, "a repetition penalty needs the tokens of the text so far"
        penalty = sampling.repetition_penalty
        logits_BV = jnp.where(seen_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)
    if sampling.temperature == 0:
        return logits_BV
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        threshold_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < threshold_B1, -jnp.inf, logits_BV)
    if sampling.top_p < 1:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV  # total probability of the likelier tokens
        threshold_B1 = jnp.min(jnp.where(before_BV < sampling.top_p, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < threshold_B1, -jnp.inf, logits_BV)
    if sampling.min_p > 0:
        threshold_B1 = jnp.max(logits_BV, axis=-1, keepdims=True) + math.log(sampling.min_p)
        logits_BV = jnp.where(logits_BV < threshold_B1, -jnp.inf, logits_BV)
    return logits_BV


def choose(logits_BV: jax.Array, seen_BV: jax.Array | None, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns int32[B], one token for each row. Each row has a separate key, so that rows are independent."""
    logits_BV = filtered(logits_BV, seen_BV, sampling)
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def check_prompts(prompts: Sequence[Sequence[int]], engine: Engine) -> None:
    """Raises BadInput for prompts that cannot be continued."""
    if not 0 < len(prompts) <= engine.batch:
        raise BadInput(f"got {len(prompts)} prompts for a batch of {engine.batch}; pass 1 to {engine.batch} prompts")
    for number, prompt in enumerate(prompts, 1):
        if not len(prompt):
            raise BadInput(f"prompt {number} has no tokens; pass at least one")
        if len(prompt) > engine.longest:
            raise BadInput(f"prompt {number} has {len(prompt)} tokens, but at most {engine.longest} fit; shorten it")
        if not 0 <= min(prompt) <= max(prompt) < engine.sharded.cfg.vocab_size:
            worst, size = min(prompt) if min(prompt) < 0 else max(prompt), engine.sharded.cfg.vocab_size
            raise BadInput(f"prompt {number} has token id {worst}, but the model has {size} ids; use its tokenizer")


def prompt_length(tokens: int, longest: int) -> int:
    """Returns the padded length of prompts. There are only few such lengths, so that few programs are compiled."""
    return min(MIN_PROMPT << (max(tokens - 1, 0) // MIN_PROMPT).bit_length(), longest)


def prompt_numbers(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Returns an int per prompt to fold into its random key. Equal prompts in a batch get different ints."""
    seen: collections.Counter = collections.Counter()
    numbers = []
    for prompt in map(tuple, prompts):
        numbers.append(zlib.crc32(np.asarray([seen[prompt], *prompt], "<i4").tobytes()) >> 1)  # 31 bits fit int32
        seen[prompt] += 1
    return numbers
