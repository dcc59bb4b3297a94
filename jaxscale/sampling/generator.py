"""Text from a model, token by token: a compiled reading of the prompts, and a compiled step for one more token of each.

Prompts of different length lie in one batch, filled up on the right: every row has its own position. What a row draws
depends on the seed, on the row's own number and on how many tokens it has drawn, never on the batch or the mesh.

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

from jaxscale.models.model import unembed
from jaxscale.models.sharded import ShardedModel
from jaxscale.ops.project import with_precision
from jaxscale.sampling.cache import Cache, CacheReader, CacheRecorder, cache_axes, filled, num_slots
from jaxscale.sampling.config import Sampling
from jaxscale.sharding.rules import partition_spec
from jaxscale.sharding.shardings import replicated
from jaxscale.sharding.tensor_axis import WholeRows, make_tensor_axis
from jaxscale.system.exits import BadInput

ENDED = -1  # in the place of a token, from a row that has ended
NO_NUMBER = -2  # the same, from a row whose logits are not finite: raised as NotFinite, never handed out
LEAST_PROMPT = 16  # tokens for which a prompt's program is made; from there on each is twice as long
AHEAD = 2  # steps that are under way when a token is handed out, so that the device does not wait for who reads it


class NotFinite(BadInput):
    """The model gives NaN or infinities, of which no token can be drawn."""


class State(NamedTuple):
    """Where each row is."""

    cache: Cache
    lengths_B: jax.Array  # int32: tokens in the cache
    last_B: jax.Array  # int32: the newest token, not in the cache yet
    ended_B: jax.Array  # bool
    drawn_B: jax.Array  # int32: tokens drawn so far
    number_B: jax.Array  # int32: of the row, for its random numbers
    seen_BV: jax.Array | None  # bool: tokens of the text so far, where a penalty asks for them
    seed: jax.Array  # uint32[]


@dataclasses.dataclass(frozen=True)
class Timing:
    """What one call of generate() took [seconds], compilation left out."""

    compile_seconds: float
    prefill_seconds: float
    prompt_tokens: int
    decode_seconds: float
    decoded_tokens: int  # those after the first of each row, which the prompts' own pass gives

    @property
    def prefill_rate(self) -> float:
        """Tokens of prompts read per second."""
        return self.prompt_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        """Tokens written per second, over all rows."""
        return self.decoded_tokens / max(self.decode_seconds, 1e-9)


class Engine:
    """The compiled programs for batches of `batch` rows and texts of at most `longest` tokens, of one model on a mesh.

    It holds no parameters: a model that is being trained hands them over anew. num_ids: of the tokenizer; the model's
    vocabulary may have rows behind them, which are never drawn, nor are those in `never`. say: is told of compilations.
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
            raise BadInput(f"model.name={cfg.name!r} writes no text from left to right; llama and gpt2 do")
        if limit is not None and longest > limit:
            raise BadInput(f"a text of {longest} tokens is longer than the model can read, max_seq_len={limit}")
        self.sharded, self.longest, self.say = sharded, longest, say
        self.batch = batch + -batch % sharded.batch_axes.num_shards
        self.drawable_V = np.arange(cfg.vocab_size) < (num_ids or cfg.vocab_size)
        self.drawable_V[list(never)] = False
        self.slots = num_slots(sharded.needs, longest)
        self.tensor = WholeRows(sharded.mesh.shape["tensor"], make_tensor_axis(sharded.mesh).stages)
        self.cache_spec = partition_spec(cache_axes(cfg), sharded.rules.params)
        self.rows_spec = P(*partition_spec(("act_batch",), sharded.rules.params))
        self.programs: dict[Any, Any] = {}

    def read_prompts(self, params: Any, tokens_BT: jax.Array, lengths_B: jax.Array) -> tuple[Cache, jax.Array]:
        """(the cache, float32[B, V] logits after the last token of each row), of the device's own rows and heads."""
        recorder = CacheRecorder()
        model = self.sharded.merge(params, tensor=self.tensor, recorder=recorder)
        T = tokens_BT.shape[1]
        positions_BT = jnp.minimum(jnp.arange(T)[None], lengths_B[:, None] - 1)
        text_BT = (jnp.arange(T)[None] < lengths_B[:, None]).astype(jnp.int32)
        h_BTD = model.hidden(tokens_BT, positions_BT, text_BT)
        h_BD = jnp.take_along_axis(h_BTD, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
        return filled(recorder.whole, lengths_B, self.slots), unembed(model, h_BD)

    def read_one(self, params: Any, cache: Cache, tokens_B: jax.Array, lengths_B: jax.Array) -> tuple[Cache, jax.Array]:
        """(the cache with one more token of each row, float32[B, V] logits after it)."""
        recorder = CacheReader(cache, lengths_B, self.sharded.needs, tuple(self.sharded.cfg.layer_stacks.values()))
        model = self.sharded.merge(params, tensor=self.tensor, recorder=recorder)
        ones_B1 = jnp.ones_like(tokens_B)[:, None]
        h_B1D = model.hidden(tokens_B[:, None], lengths_B[:, None], ones_B1)
        return recorder.extended(), unembed(model, h_B1D[:, 0])

    def state_spec(self, sampling: Sampling) -> State:
        """Returns the partition spec of each array of the state, in its place."""
        rows = self.rows_spec
        seen = rows if sampling.looks_back else None
        cache = Cache._make((self.cache_spec, self.cache_spec))
        return State._make((cache, rows, rows, rows, rows, rows, seen, P()))

    def drawn(self, state: State, logits_BV: jax.Array, sampling: Sampling, stop_ids: tuple[int, ...]):
        """(the state with one token more, int32[B] the token, ENDED or NO_NUMBER)."""
        broken_B = ~jnp.all(jnp.isfinite(logits_BV), axis=-1)
        logits_BV = jnp.where(self.drawable_V[None], logits_BV, -jnp.inf)
        own = lambda number, drawn: jax.random.fold_in(
            jax.random.fold_in(jax.random.key(state.seed), number), drawn
        )  # a row's first draw, second draw, ...
        keys_B = jax.vmap(own)(state.number_B, state.drawn_B)
        next_B = choose(logits_BV, state.seen_BV, keys_B, sampling)
        ended_B = state.ended_B | (state.lengths_B >= self.longest)
        for stop in stop_ids:
            ended_B |= (next_B == stop) & ~broken_B  # of NaN id 0 is the likeliest, which may be a stop id
        seen_BV = state.seen_BV
        if seen_BV is not None:
            seen_BV = seen_BV.at[jnp.arange(next_B.shape[0]), next_B].set(True)
        state = state._replace(last_B=next_B, ended_B=ended_B, drawn_B=state.drawn_B + 1, seen_BV=seen_BV)
        return state, jnp.where(ended_B, ENDED, jnp.where(broken_B, NO_NUMBER, next_B))

    @functools.cache  # noqa: B019 - as long as the engine lives
    def functions(self, sampling: Sampling, stop_ids: tuple[int, ...]) -> tuple[Callable, Callable]:
        """(begin(params, tokens_BT, lengths_B, number_B, seed), go_on(params, state)) -> (state, tokens_B), jitted."""
        sharded, rows, state_spec = self.sharded, self.rows_spec, self.state_spec(sampling)
        precisely = functools.partial(with_precision, sharded.cfg.matmul_precision)

        def begin(params: Any, tokens_BT, lengths_B, number_B, seed):
            B, T = tokens_BT.shape
            ended_B, lengths_B = lengths_B == 0, jnp.maximum(lengths_B, 1)
            seen_BV = None
            if sampling.looks_back:
                text_BT = jnp.arange(T)[None] < lengths_B[:, None]
                seen_BV = jnp.zeros((B, sharded.cfg.vocab_size), bool)
                seen_BV = seen_BV.at[jnp.arange(B)[:, None], tokens_BT].max(text_BT)
            cache, logits_BV = self.read_prompts(params, tokens_BT, lengths_B)
            zeros_B = jnp.zeros_like(lengths_B)
            state = State(cache, lengths_B, zeros_B, ended_B, zeros_B, number_B, seen_BV, seed)
            return self.drawn(state, logits_BV, sampling, stop_ids)

        def go_on(params: Any, state: State):
            cache, logits_BV = self.read_one(params, state.cache, state.last_B, state.lengths_B)
            state = state._replace(cache=cache, lengths_B=state.lengths_B + ~state.ended_B)
            return self.drawn(state, logits_BV, sampling, stop_ids)

        shard_map, specs, out_specs = sharded.batch_axes.shard_map, sharded.specs, (state_spec, rows)
        begin = shard_map(precisely(begin), (specs, rows, rows, rows, P()), out_specs)
        go_on = shard_map(precisely(go_on), (specs, state_spec), out_specs)
        place = functools.partial(jax.sharding.NamedSharding, sharded.mesh)
        shardings = jax.tree.map(place, state_spec, is_leaf=lambda leaf: isinstance(leaf, P))
        out = (shardings, replicated(sharded.mesh))
        return jax.jit(begin, out_shardings=out), jax.jit(go_on, donate_argnums=1, out_shardings=out)

    def compiled(self, params: Any, arguments: tuple, sampling: Sampling, stop_ids: tuple[int, ...]):
        """(begin, go_on, seconds that compiling them took now) for prompts like these."""
        began = time.monotonic()
        length = arguments[0].shape[1]
        begin, go_on = self.functions(sampling, stop_ids)
        key = (sampling, stop_ids)
        if (*key, length) not in self.programs:
            rows = f"{self.batch} row{'s' if self.batch > 1 else ''}"
            self.say(f"compiling for {rows}, prompts of up to {length} tokens and texts of up to {self.longest}")
            lowered = begin.lower(params, *arguments)
            self.programs[*key, length] = lowered.compile()
            state = jax.tree.map(
                lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
                lowered.out_info[0],
                self.programs[*key, length].output_shardings[0],
            )
            if key not in self.programs:
                self.programs[key] = go_on.lower(params, state).compile()
            self.say(f"compiled in {time.monotonic() - began:.1f} s")
        return self.programs[*key, length], self.programs[key], time.monotonic() - began


@dataclasses.dataclass
class Generator:
    """An engine with the parameters of a model."""

    engine: Engine
    params: Any
    timing: Timing | None = None  # of the last call of generate, once it has ended

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sampling,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        seed: int = 0,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[np.ndarray]:
        """Yields int32[rows] for each step: the next token of every prompt, -1 from where a row has ended.

        A row ends before a token of stop_ids, and where its text has `longest` tokens. numbers: of the rows, for their
        random numbers; none: own_numbers(prompts).
        Raises BadInput for a prompt that is empty or too long, and for more prompts than the batch has rows, and
        NotFinite where a row's logits are no finite numbers.
        """
        engine, self.timing = self.engine, None
        check_prompts(prompts, engine)
        numbers = own_numbers(prompts) if numbers is None else numbers
        arguments = self.place(prompts, numbers, seed)
        begin, go_on, compile_seconds = engine.compiled(self.params, arguments, settings, tuple(stop_ids))
        began = time.monotonic()
        state, tokens_B = begin(self.params, *arguments)
        pending, started, steps, written = collections.deque([tokens_B]), 1, 0, 0
        prefill_seconds = None
        while pending:
            while started < max_new_tokens and len(pending) <= AHEAD:
                state, tokens_B = go_on(self.params, state)
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
            if (broken := np.flatnonzero(found_B == NO_NUMBER)).size:
                raise NotFinite(
                    f"the model gives no finite numbers for token {steps} behind prompt {broken[0] + 1}: its weights "
                    f"have diverged, or overflow {engine.sharded.cfg.compute_dtype}; take an older step, or float32"
                )
            if (found_B == ENDED).all():
                return
            yield found_B
            if steps >= max_new_tokens:
                return

    def place(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], seed: int) -> tuple:
        """The arguments of the first program, on the mesh: rows that no prompt is for have no tokens."""
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
    """Logits of the distribution that is drawn from, float32[B, V], -inf for a token that is not drawn.

    seen_BV: bool, tokens of the text so far; only for a repetition penalty. At temperature 0 they are not divided.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    if sampling.looks_back:
        assert seen_BV is not None, "a repetition penalty needs the tokens of the text so far"
        penalty = sampling.repetition_penalty
        logits_BV = jnp.where(seen_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)
    if sampling.temperature == 0:
        return logits_BV
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        least_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if sampling.top_p < 1:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        share_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(share_BV, axis=-1) - share_BV  # of what is likelier
        least_B1 = jnp.min(jnp.where(before_BV < sampling.top_p, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if sampling.min_p > 0:
        least_B1 = jnp.max(logits_BV, axis=-1, keepdims=True) + math.log(sampling.min_p)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return logits_BV


def choose(logits_BV: jax.Array, seen_BV: jax.Array | None, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """int32[B]: a token for each row, drawn with the row's own key, so that no row depends on what is beside it."""
    logits_BV = filtered(logits_BV, seen_BV, sampling)
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def check_prompts(prompts: Sequence[Sequence[int]], engine: Engine) -> None:
    """Raises BadInput unless these prompts can be gone on from."""
    if not 0 < len(prompts) <= engine.batch:
        raise BadInput(f"{len(prompts)} prompts for a batch of {engine.batch} rows; give 1 to {engine.batch}")
    for number, prompt in enumerate(prompts, 1):
        if not len(prompt):
            raise BadInput(f"prompt {number} has no token; the first one needs another before it")
        if len(prompt) > engine.longest:
            raise BadInput(f"prompt {number} has {len(prompt)} tokens, and a text here has at most {engine.longest}")
        if not 0 <= min(prompt) <= max(prompt) < engine.sharded.cfg.vocab_size:
            worst = min(prompt) if min(prompt) < 0 else max(prompt)
            raise BadInput(
                f"prompt {number} has the token id {worst}, and the model's vocabulary is "
                f"{engine.sharded.cfg.vocab_size}"
            )


def prompt_length(tokens: int, longest: int) -> int:
    """The length to which prompts are filled up: one of few, so that few programs are compiled."""
    length = LEAST_PROMPT
    while length < tokens:
        length *= 2
    return min(length, longest)


def own_numbers(prompts: Sequence[Sequence[int]]) -> list[int]:
    """For the random numbers of each prompt, a number of its own: of its tokens, and of how many before it are equal.

    So equal prompts get different texts, unlike prompts do not draw alike, and a text does not depend on other prompts.
    """
    seen: collections.Counter = collections.Counter()
    numbers = []
    for prompt in map(tuple, prompts):
        numbers.append(zlib.crc32(np.asarray([seen[prompt], *prompt], "<i4").tobytes()) >> 1)  # 31 bits, as int32 holds
        seen[prompt] += 1
    return numbers
