"""How large a model, and how many tokens: the compute-optimal rule, a published fit of the loss, what serving adds.

N parameters  D tokens  C operations of training
"""

import math
from typing import NamedTuple

SMALLEST_FITTED = 70e6  # parameters of the smallest models that the fit saw: arXiv:2203.15556, abstract
TOKENS_PER_PARAM = 20.0  # arXiv:2203.15556: 70B parameters on 1.4T tokens, and both grow alike


class LossFit(NamedTuple):
    """Loss in nats a token = E + A / N**alpha + B / D**beta."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str


# The first fit, that paper's own, does not give its optimum back, which this one explains and repairs.
BESIROGLU = LossFit(1.8172, 482.01, 2085.43, 0.3478, 0.3658, "arXiv:2404.10102, a refit of arXiv:2203.15556")


class Alternative(NamedTuple):
    """Another size for the same loss or the same operations."""

    params: float
    tokens: float
    flops: float
    loss: float | None  # nats a token, by the fit; None for models smaller than it saw
    served_tokens: float | None = None  # tokens served after which it has paid for its longer training


def train_flops(params: float, tokens: float) -> float:
    """6 N D: operations of training, attention's products left out. Source: arXiv:2001.08361, section 2.1."""
    return 6 * params * tokens


def optimal_params(flops: float) -> float:
    """N of a compute-optimal run: (C / 6 / 20) ** 0.5."""
    return math.sqrt(flops / 6 / TOKENS_PER_PARAM)


def optimal_tokens(params: float) -> float:
    """D that goes with N: 20 N."""
    return TOKENS_PER_PARAM * params


def predicted_loss(params: float, tokens: float, fit: LossFit = BESIROGLU) -> float:
    """Nats a token of the fit's own data and tokenizer: to compare sizes with, not to forecast another corpus."""
    return fit.E + fit.A / params**fit.alpha + fit.B / tokens**fit.beta


def fitted_loss(params: float, tokens: float) -> float | None:
    """predicted_loss, or None for a model smaller than any that the fit saw: there it says more than chance would."""
    return predicted_loss(params, tokens) if params >= SMALLEST_FITTED else None


def tokens_for_loss(params: float, loss: float, fit: LossFit = BESIROGLU) -> float | None:
    """D at which a model of N parameters reaches the loss; None if it never does."""
    left = loss - fit.E - fit.A / params**fit.alpha
    return (fit.B / left) ** (1 / fit.beta) if left > 0 else None


def optimal_alternative(flops: float) -> Alternative:
    """The compute-optimal size for so many operations."""
    params = optimal_params(flops)
    tokens = optimal_tokens(params)
    return Alternative(params, tokens, flops, fitted_loss(params, tokens))


def serving_alternatives(params: float, tokens: float, fit: LossFit = BESIROGLU) -> list[Alternative]:
    """Smaller models that reach the same loss with more tokens: three quarters and half of the size, where they can.

    served_tokens: tokens generated or read at 2 N operations each, after which the smaller model has cost less in all
    (the reasoning of arXiv:2401.00448). 0 if its training alone is cheaper. [] where the smaller ones were not fitted.
    """
    if params * 0.5 < SMALLEST_FITTED:
        return []
    loss, found = predicted_loss(params, tokens, fit), []
    for share in (0.75, 0.5):
        smaller = share * params
        needed = tokens_for_loss(smaller, loss, fit)
        if needed is None:
            continue
        more = train_flops(smaller, needed) - train_flops(params, tokens)
        served = max(0.0, more / (2 * (params - smaller)))
        found.append(Alternative(smaller, needed, train_flops(smaller, needed), loss, served))
    return found
