"""Rates, batches and warmups of runs that were published, and the formulas fitted to sweeps of them.

N parameters  D tokens  C operations of training
"""

import math
from typing import NamedTuple


class PublishedRun(NamedTuple):
    """What one published run used."""

    name: str
    params: float
    peak_lr: float
    batch_tokens: float
    source: str


GPT3 = "arXiv:2005.14165, table 2.1"
LLAMA2 = "arXiv:2307.09288, section 2.2"
DEEPSEEK = "arXiv:2401.02954, table 2"
RUNS = (
    PublishedRun("GPT-3 Small", 125e6, 6.0e-4, 0.5e6, GPT3),
    PublishedRun("GPT-3 Medium", 350e6, 3.0e-4, 0.5e6, GPT3),
    PublishedRun("GPT-3 Large", 760e6, 2.5e-4, 0.5e6, GPT3),
    PublishedRun("TinyLlama", 1.1e9, 4.0e-4, 2e6, "arXiv:2401.02385"),
    PublishedRun("GPT-3 XL", 1.3e9, 2.0e-4, 1e6, GPT3),
    PublishedRun("GPT-3 2.7B", 2.7e9, 1.6e-4, 1e6, GPT3),
    PublishedRun("GPT-3 6.7B", 6.7e9, 1.2e-4, 2e6, GPT3),
    PublishedRun("Llama 2 7B", 7e9, 3.0e-4, 4e6, LLAMA2),
    PublishedRun("DeepSeek 7B", 7e9, 4.2e-4, 2304 * 4096, DEEPSEEK),
    PublishedRun("GPT-3 13B", 13e9, 1.0e-4, 2e6, GPT3),
    PublishedRun("Llama 2 13B", 13e9, 3.0e-4, 4e6, LLAMA2),
    PublishedRun("DeepSeek 67B", 67e9, 3.2e-4, 4608 * 4096, DEEPSEEK),
    PublishedRun("Llama 2 70B", 70e9, 1.5e-4, 4e6, LLAMA2),
    PublishedRun("GPT-3", 175e9, 0.6e-4, 3.2e6, GPT3),
    PublishedRun("Llama 3 405B", 405e9, 8.0e-5, 16e6, "arXiv:2407.21783, section 3.4.1"),
)
NEAR = 2.5  # sizes within this factor are compared with

WARMUP_TOKENS = 375e6  # arXiv:2005.14165, appendix B: of every size
WARMUP_STEPS = 2000  # arXiv:2307.09288, section 2.2; 8,000 at 405B: arXiv:2407.21783, section 3.4.1
WARMUP_FROM_PARAMS = 1e9  # below it the published runs vary too much to be a rule


def near_runs(params: float) -> list[PublishedRun]:
    """The published runs of about this size; [] where there are none."""
    return [run for run in RUNS if 1 / NEAR <= run.params / params <= NEAR]


def linear_rule(run: PublishedRun, batch_tokens: float) -> float:
    """A run's rate for another batch, by the rule for SGD: as the batch (arXiv:1706.02677)."""
    return run.peak_lr * batch_tokens / run.batch_tokens


def square_root_rule(run: PublishedRun, batch_tokens: float) -> float:
    """A run's rate for another batch, by the rule for Adam: as the root of the batch (arXiv:2205.10287)."""
    return run.peak_lr * (batch_tokens / run.batch_tokens) ** 0.5


def rate_by_flops(flops: float) -> float:
    """0.3118 C ** -0.1250. Source: arXiv:2401.02954, equation 1."""
    return 0.3118 * flops**-0.1250


def batch_by_flops(flops: float) -> float:
    """Tokens: 0.2920 C ** 0.3271. Source: arXiv:2401.02954, equation 1."""
    return 0.2920 * flops**0.3271


def rate_by_params(params: float) -> float | None:
    """0.003239 - 0.0001395 ln N, up to 1.5e9; None beyond. Source: arXiv:2001.08361, appendix D.6."""
    return 0.003239 - 0.0001395 * math.log(params) if params <= 1.5e9 else None


def rate_by_size(params: float, tokens: float) -> float:
    """1.79 N ** -0.713 D ** 0.307. Source: arXiv:2503.04715, equation 1."""
    return 1.79 * params**-0.713 * tokens**0.307


def batch_by_tokens(tokens: float) -> float:
    """The batch of lowest loss, in tokens: 0.58 D ** 0.571. Source: arXiv:2503.04715, equation 1."""
    return 0.58 * tokens**0.571


def critical_batch(loss: float) -> float:
    """Tokens of a batch beyond which steps hardly save tokens: 2.1e8 L ** -4.8, L in nats.

    The notion: arXiv:1812.06162; the fit for language models: arXiv:2001.08361, figure 10.
    """
    return 2.1e8 * loss**-4.8
