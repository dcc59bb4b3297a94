"""Comparison of each kernel's values and gradients with a float32 reference on the same device.

B batch  T query position  S key position  D embed  N query heads  K key-value heads  H head dim  V vocab  F mlp
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.core.plan import single_device_plan
from jaxscale.kernels.activation import geglu_tanh, swiglu
from jaxscale.kernels.attention import HARDWARE, PLATFORM_DEFAULT, resolve_attention, xla
from jaxscale.kernels.attention.flash import BLOCKWISE_MAX_LEN
from jaxscale.kernels.config import AttentionName, AttentionNeeds, MatmulDtype
from jaxscale.kernels.matmul.project import quantized_project
from jaxscale.kernels.norm import layer_norm, rms_norm
from jaxscale.kernels.rope import frequencies, make_rotation
from jaxscale.kernels.vocabulary import LossSettings, summed_cross_entropy
from jaxscale.system import packages
from jaxscale.system.exits import BadInput
from jaxscale.tools.qualify.result import Machine, Probe, Reading, first_words

F32 = jnp.float32
EPS = 1e-6
ROPE_BASE = 10_000.0
ATTENTIONS = [name for name in get_args(AttentionName) if name not in ("auto", "xla")]  # "xla" is the reference
# Relative RMS errors, about three times the errors measured on XLA:CPU (at most 0.0031 in bfloat16, 0.011 in int8, and
# 0.037 for values and 0.059 for gradients in fp8; jax 0.10.2, 2026-11-23). float16 has 3 more mantissa bits than
# bfloat16. The error of a wrong kernel is 0.1 or more.
TOLERANCE = {"bfloat16": (0.01, 0.01), "float16": (0.01 / 8, 0.01 / 8)}  # (values, gradients)
EIGHT_BIT: dict[MatmulDtype, tuple[float, float]] = {"int8": (0.03, 0.03), "fp8": (0.1, 0.15)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel, its float32 reference, and the largest errors allowed."""

    name: str
    kernel: Callable[..., Any]  # takes the operands in `dtype`
    exact: Callable[..., Any]  # takes the same operands in float32
    operands: tuple[jax.Array, ...]  # float32; gradients are taken with respect to all of them
    dtype: str
    value_most: float
    gradient_most: float


def measure_kernels(machine: Machine) -> Probe:
    """Measures the relative errors of each kernel's value and gradients. Notes list skipped kernels."""
    figures, notes, problems = [], [], []
    dtype = compute_dtype(machine)
    for make in (attention_cases, loss_case, small_cases, product_cases):
        for case in make(machine, dtype):
            if isinstance(case, str):
                notes.append(case)
                continue
            try:
                value, gradient = errors_of(case)
            except Exception as error:  # other kernels are still measured
                problems.append(f"{case.name}: {first_words(error)}")
                continue
            for what, error, most in (("value", value, case.value_most), ("gradients", gradient, case.gradient_most)):
                figures.append(Reading(name=f"{case.name}: {what}", value=error, unit="share", most=most))
    notes.append(f"errors are RMS, relative to the RMS of the exact result; operands in {dtype}")
    return Probe(name="kernels", figures=tuple(figures), notes=tuple(notes), problem="; ".join(problems))


def compute_dtype(machine: Machine) -> str:
    """Returns the compute dtype for training on these devices: bfloat16, or float16 if bfloat16 is not supported."""
    return "float16" if machine.chip and not machine.chip.bfloat16 else "bfloat16"


def errors_of(case: Case) -> tuple[float, float]:
    """Returns (error of the value, largest error of the gradients), as RMS relative to the reference."""
    rounded = tuple(x.astype(case.dtype) for x in case.operands)
    exact_operands = tuple(x.astype(F32) for x in rounded)
    with jax.default_matmul_precision("highest"):  # TPUs and GPUs use fewer bits by default
        value, pull = jax.vjp(jax.jit(case.exact), *exact_operands)
    cotangent = jax.random.normal(jax.random.key(1), value.shape, F32).astype(case.dtype)
    cotangent = cotangent if value.ndim else jnp.ones((), case.dtype)

    @jax.jit
    def value_and_grads(cotangent: jax.Array, *operands: jax.Array) -> tuple[jax.Array, Any]:
        result, kernel_vjp = jax.vjp(case.kernel, *operands)
        return result, kernel_vjp(cotangent.astype(result.dtype))

    found, gradients = value_and_grads(cotangent, *rounded)
    wanted = pull(cotangent.astype(F32))
    return relative(found, value), float(np.max([*map(relative, gradients, wanted)]))  # max() would drop a NaN


def relative(found: jax.Array, wanted: jax.Array) -> float:
    """Returns the RMS of the difference divided by the RMS of `wanted`."""
    difference = found.astype(F32) - wanted
    return float(jnp.sqrt(jnp.mean(jnp.square(difference)) / jnp.mean(jnp.square(wanted))))


def normal(number: int, *shape: int) -> jax.Array:
    """Returns standard normal random numbers in float32. number: the seed."""
    return jax.random.normal(jax.random.key(number), shape, F32)


def attention_cases(machine: Machine, dtype: str) -> Iterator[Case | str]:
    """Yields one case per attention kernel and variant, or a note if the kernel does not support the variant."""
    device = jax.local_devices()[0]
    lengths = (256, BLOCKWISE_MAX_LEN + 76) if machine.on_cpu else (2048, 1100)  # on CPU, long sequences use flash.py
    heads = (4, 2) if machine.on_cpu else (8, 2)
    needs_of = functools.partial(AttentionNeeds, head_dim=64 if machine.on_cpu else 128, dtype=dtype)
    variants = [(needs_of(), "", length) for length in lengths]
    variants.append((needs_of(window=100), ", window 100", lengths[0]))
    variants.append((needs_of(softcap=20.0), ", softcap", lengths[0]))
    for form in ATTENTIONS:
        if form in HARDWARE and PLATFORM_DEFAULT.get(machine.platform) != form:
            continue
        for needs, words, length in variants:
            name = f"{form} attention of length {length}{words}"
            try:
                attend, *_ = resolve_attention(form, machine.platform, needs, device)
            except BadInput as error:
                yield f"{name}: skipped, {error}"
                continue
            exact = xla.make_attend(softcap=needs.softcap, window=needs.window)
            (N, K), H = heads, needs.head_dim  # two sequences of three documents each
            ids_BT = jnp.repeat(jnp.arange(1, 4), -(-length // 3))[None, :length] * jnp.ones((2, 1), jnp.int32)
            operands = (normal(2, 2, length, N, H), normal(3, 2, length, K, H), normal(4, 2, length, K, H))
            kernel, reference = (lambda q, k, v, f=f, ids=ids_BT: f(q, k, v, ids) for f in (attend, exact))
            yield Case(name, kernel, reference, operands, dtype, *TOLERANCE[dtype])


def loss_case(machine: Machine, dtype: str) -> Iterator[Case]:
    """Yields the case of chunked cross-entropy with z-loss. Its reference computes all logits at once."""
    B, T, D, V = (2, 64, 64, 512) if machine.on_cpu else (4, 512, 1024, 32_768)
    targets_BT = jax.random.randint(jax.random.key(5), (B, T), 0, V)
    weights_BT = jnp.ones((B, T), F32).at[:, T // 2].set(0.0)
    cfg = LossSettings(chunk_tokens=B * T // 4, z_loss=1e-4)

    def exact(h_BTD: jax.Array, w_DV: jax.Array) -> jax.Array:
        logits_BTV = jnp.einsum("BTD,DV->BTV", h_BTD, w_DV)
        lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
        target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
        return jnp.sum((lse_BT - target_BT + 1e-4 * lse_BT**2) * weights_BT)

    kernel = lambda h_BTD, w_DV: summed_cross_entropy(h_BTD, w_DV, targets_BT, weights_BT, cfg).total
    operands = (normal(6, B, T, D), normal(7, D, V) * D**-0.5)
    yield Case(f"cross-entropy, vocabulary {V}", kernel, exact, operands, dtype, *TOLERANCE[dtype])


def small_cases(machine: Machine, dtype: str) -> Iterator[Case]:
    """Yields the cases of norms, gated activations and rotary position embeddings."""
    shape = (2, 128, 256) if machine.on_cpu else (4, 1024, 2048)
    x, scale, bias = normal(8, *shape), 1 + 0.1 * normal(9, shape[-1]), normal(10, shape[-1])
    mean = functools.partial(jnp.mean, axis=-1, keepdims=True)
    exact_rms = lambda x, scale: x / jnp.sqrt(mean(x * x) + EPS) * scale[None, None]
    exact_layer = lambda x, scale, bias: exact_rms(x - mean(x), scale) + bias[None, None]
    allowed = TOLERANCE[dtype]
    yield Case("rms_norm", lambda x, s: rms_norm(x, s, EPS), exact_rms, (x, scale), dtype, *allowed)
    yield Case("layer_norm", lambda x, s, b: layer_norm(x, s, b, EPS), exact_layer, (x, scale, bias), dtype, *allowed)
    pair = (x, normal(11, *shape))
    yield Case("swiglu", swiglu, lambda g, u: g / (1 + jnp.exp(-g)) * u, pair, dtype, *allowed)
    gelu = lambda g: 0.5 * g * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (g + 0.044715 * g**3)))
    yield Case("geglu_tanh", geglu_tanh, lambda g, u: gelu(g) * u, pair, dtype, *allowed)
    B, T, H = 2, shape[1], 64
    positions_BT = jnp.arange(T)[None] * jnp.ones((B, 1), jnp.int32)
    rotation = make_rotation(positions_BT, H, ROPE_BASE)
    turn = single_device_plan(machine.platform, "xla", AttentionNeeds(head_dim=H, dtype=dtype)).rotate
    exact = functools.partial(exact_rotary, positions_BT)
    yield Case("rotary positions", lambda x: turn(x, rotation), exact, (normal(12, B, T, 4, H),), dtype, *allowed)


def exact_rotary(positions_BT: jax.Array, x_BTNH: jax.Array) -> jax.Array:
    """Returns rotary position embeddings as products of complex numbers, made from the halves of a head."""
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    freq_h = jnp.asarray(frequencies(x_BTNH.shape[-1], ROPE_BASE), F32)
    angle_BT1h = positions_BT[:, :, None, None] * freq_h[None, None, None]
    product = jax.lax.complex(first, second) * jnp.exp(1j * angle_BT1h)
    return jnp.concatenate([product.real, product.imag], axis=-1)


def product_cases(machine: Machine, dtype: str) -> Iterator[Case | str]:
    """Yields the cases of projections in `dtype`, and in the 8-bit dtypes that the chip's datasheet lists."""
    B, T, D, F = (2, 128, 256, 512) if machine.on_cpu else (4, 1024, 2048, 4096)
    spec, operands = "BTD,DF->BTF", (normal(13, B, T, D), normal(14, D, F) * D**-0.5)
    exact = functools.partial(jnp.einsum, spec)
    needs = AttentionNeeds(head_dim=64, dtype=dtype)
    project = single_device_plan(machine.platform, "xla", needs).project
    yield Case("projection", functools.partial(project, spec), exact, operands, dtype, *TOLERANCE[dtype])
    has: dict[MatmulDtype, Any] = {"int8": machine.on_cpu or (machine.chip and machine.chip.int8_flops)}
    has["fp8"] = machine.on_cpu or (machine.chip and machine.chip.fp8_flops)
    for name in EIGHT_BIT:
        if not has[name]:
            yield f"projection in {name}: skipped, the datasheet lists no {name} matmuls"
        elif not packages.is_installed("qwix"):
            yield f"projection in {name}: skipped, qwix is not installed: pip install 'jaxscale[quant]'"
        else:
            kernel = functools.partial(quantized_project(project, name), spec)
            yield Case(f"projection in {name}", kernel, exact, operands, dtype, *EIGHT_BIT[name])
