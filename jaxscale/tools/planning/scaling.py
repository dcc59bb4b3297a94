"""Published rules, fits and runs for model size, tokens, batch and learning rate, and the effect of serving costs.

N is parameters, D tokens and C training FLOPs.
"""

import math
from typing import NamedTuple

from jaxscale.core.models.config import ModelConfig

SMALLEST_FITTED = 70e6  # parameters of the smallest fitted models: arXiv:2203.15556, abstract
TOKENS_PER_PARAM = 20.0  # arXiv:2203.15556: 70B parameters on 1.4T tokens, in proportion for other sizes

WARMUP_TOKENS = 375e6  # for all sizes: arXiv:2005.14165, appendix B
WARMUP_STEPS = 2000  # arXiv:2307.09288, section 2.2; 8,000 at 405B: arXiv:2407.21783, section 3.4.1
WARMUP_FROM_PARAMS = 1e9  # for smaller models, warmups of published runs vary too much for a rule


def rate_over_width(optimizer: str, times: float) -> float:
    """Returns the factor for the best learning rate if the width is multiplied by `times`, without muP.

    The best learning rate is proportional to 1 / width for Adam (arXiv:2203.03466), and to 1 / sqrt(width) for Muon, so
    that an update changes the output of a matrix equally at every width (arXiv:2310.17813).
    """
    return times ** (-0.5 if optimizer == "muon" else -1.0)


def is_mixture(model: ModelConfig) -> bool:
    """Returns True if a token uses only some of the parameters, as in a mixture of experts."""
    return model.active_params != model.num_params


def laws_hold(model: ModelConfig) -> bool:
    """Returns True if published scaling laws cover the model. They cover only dense decoders."""
    return model.kind == "decoder" and not is_mixture(model)


class Terms(NamedTuple):
    """Parameters of L = E + A / N**alpha + B / D**beta nats per token. A law without a term has A = 0 or B = 0."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, params: float, tokens: float) -> float:
        """Returns the loss in nats per token."""
        in_params = self.A * params**-self.alpha if self.A else 0.0
        in_tokens = self.B * tokens**-self.beta if self.B else 0.0
        return self.E + in_params + in_tokens


# The original fit of arXiv:2203.15556 contradicts the paper's optimum; this refit explains and corrects the error.
BESIROGLU = Terms(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
BESIROGLU_SOURCE = "arXiv:2404.10102, a refit of arXiv:2203.15556"
# The laws of 2020, for comparison, with N excluding embeddings, on WebText2 and its tokenizer: arXiv:2001.08361,
# equations 1.1 to 1.3, table 2 (L(N, D)) and appendix A (the best size).
PF_DAY = 1e15 * 86_400  # FLOPs
KAPLAN_PARAMS, KAPLAN_TOKENS, KAPLAN_FLOPS = (8.8e13, 0.076), (5.4e13, 0.095), (3.1e8 * PF_DAY, 0.050)
KAPLAN_BOTH = (6.4e13, 0.076, 1.8e13, 0.103)
KAPLAN_BEST = (1.3e9, 0.73)  # parameters at one PF-day, and the exponent
# (lowest, highest) best learning rate relative to AdamW's. Lion: arXiv:2302.06675, section 5. Muon's updates are scaled
# to AdamW's size, so AdamW's learning rates apply (arXiv:2502.16982). The best for small models were 2, 4, 4 and at
# least 8 times AdamW's (docs/lab.md), where 8 was the end of the search.
TIMES_ADAMW = {"adamw": (1.0, 1.0), "lion": (0.1, 1 / 3), "muon": (1.0, 8.0)}


class Alternative(NamedTuple):
    """An alternative model size for the same loss or the same FLOPs."""

    params: float
    tokens: float
    flops: float
    loss: float | None  # nats per token by the fit; None for models below the range of the fit
    served_tokens: float | None = None  # tokens served after which the longer training pays off


class PublishedRun(NamedTuple):
    """Settings of one published run."""

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


def train_flops(params: float, tokens: float) -> float:
    """Returns 6 N D, the training FLOPs without attention matmuls. Source: arXiv:2001.08361, section 2.1."""
    return 6 * params * tokens


def optimal_params(flops: float) -> float:
    """Returns (C / 6 / 20) ** 0.5, the compute-optimal N with 20 tokens per parameter.

    The minimum of the BESIROGLU fit has 26 tokens per parameter for 1e18 FLOPs, 20 for 1e22, and 15 for 1e27. For 1e16
    or more FLOPs, the loss with 20 tokens per parameter is within 0.15% of this minimum.
    """
    return math.sqrt(flops / 6 / TOKENS_PER_PARAM)


def lowest_params(flops: float, fit: Terms = BESIROGLU) -> float:
    """Returns the N that minimizes the fitted loss for this many FLOPs. Source: arXiv:2203.15556, equation 4."""
    ratio = fit.alpha * fit.A / (fit.beta * fit.B)
    return (ratio * (flops / 6) ** fit.beta) ** (1 / (fit.alpha + fit.beta))


def lowest_tokens(params: float) -> float:
    """Returns the D for which N parameters are compute-optimal by the fit, or 20 N below the range of the fit."""
    if params < SMALLEST_FITTED:
        return optimal_tokens(params)
    ratio = BESIROGLU.beta * BESIROGLU.B / (BESIROGLU.alpha * BESIROGLU.A)
    return (ratio * params**BESIROGLU.alpha) ** (1 / BESIROGLU.beta)


def optimal_tokens(params: float) -> float:
    """Returns 20 N."""
    return TOKENS_PER_PARAM * params


def predicted_loss(params: float, tokens: float, fit: Terms = BESIROGLU) -> float:
    """Returns nats per token on the data and tokenizer of the fit. Use it only to compare sizes."""
    return fit.loss(params, tokens)


def fitted_loss(params: float, tokens: float) -> float | None:
    """Returns predicted_loss(), or None for models below the range of the fit."""
    return predicted_loss(params, tokens) if params >= SMALLEST_FITTED else None


def tokens_for_loss(params: float, loss: float, fit: Terms = BESIROGLU) -> float | None:
    """Returns the D at which a model of N parameters reaches the loss, or None if it cannot reach the loss."""
    remaining = loss - fit.E - fit.A / params**fit.alpha
    return (fit.B / remaining) ** (1 / fit.beta) if remaining > 0 else None


def kaplan_power(law: tuple[float, float], amount: float) -> float:
    """Returns nats per token by one of the laws of arXiv:2001.08361.

    KAPLAN_PARAMS is L(N), for training to convergence on unlimited data. KAPLAN_TOKENS is L(D), for a large model with
    early stopping. KAPLAN_FLOPS is L(C), for the best size and a batch far below the critical batch size.
    """
    return (law[0] / amount) ** law[1]


def kaplan_loss(params: float, tokens: float) -> float:
    """Returns nats per token by L(N, D) of arXiv:2001.08361, which was fitted separately from L(N) and L(D)."""
    size, size_power, data, data_power = KAPLAN_BOTH
    return ((size / params) ** (size_power / data_power) + data / tokens) ** data_power


def kaplan_alternative(flops: float) -> Alternative:
    """Returns the best size by arXiv:2001.08361. arXiv:2203.15556, section 2, criticises its schedules."""
    params = KAPLAN_BEST[0] * (flops / PF_DAY) ** KAPLAN_BEST[1]
    return Alternative(params, flops / 6 / params, flops, kaplan_power(KAPLAN_FLOPS, flops))


def optimal_alternative(flops: float) -> Alternative:
    """Returns the compute-optimal size with 20 tokens per parameter."""
    params = optimal_params(flops)
    tokens = optimal_tokens(params)
    return Alternative(params, tokens, flops, fitted_loss(params, tokens))


def lowest_alternative(flops: float) -> Alternative:
    """Returns the size with the lowest loss by the fit. Below its range, uses 20 tokens per parameter."""
    params = lowest_params(flops)
    if params < SMALLEST_FITTED:
        return optimal_alternative(flops)
    tokens = flops / 6 / params
    return Alternative(params, tokens, flops, predicted_loss(params, tokens))


def serving_alternatives(params: float, tokens: float) -> list[Alternative]:
    """Returns smaller models (3/4 and 1/2 of the size) that reach the same loss with more tokens.

    served_tokens is the number of inference tokens, at 2 N FLOPs each, after which the smaller model costs less overall
    (arXiv:2401.00448), or 0 if its training is already cheaper. Returns [] if the smallest size is below the range of
    the fit.
    """
    if params * 0.5 < SMALLEST_FITTED:
        return []
    loss, found = predicted_loss(params, tokens), []
    for smaller in (0.75 * params, 0.5 * params):
        if (needed := tokens_for_loss(smaller, loss)) is not None:
            flops = train_flops(smaller, needed)
            served = max(0.0, (flops - train_flops(params, tokens)) / (2 * (params - smaller)))
            found.append(Alternative(smaller, needed, flops, loss, served))
    return found


def batch_by_flops(flops: float) -> float:
    """Returns the best batch size in tokens for this many training FLOPs. Source: arXiv:2401.02954, equation 1."""
    return 0.2920 * flops**0.3271


def rate_by_flops(flops: float) -> float:
    """Returns the best learning rate, 0.3118 C ** -0.1250. Source: arXiv:2401.02954, equation 1."""
    return 0.3118 * flops**-0.1250


def critical_batch(loss: float) -> float:
    """Returns the critical batch size in tokens; larger batches hardly save steps (arXiv:1812.06162)."""
    return 2.1e8 * loss**-4.8  # arXiv:2001.08361, figure 10
