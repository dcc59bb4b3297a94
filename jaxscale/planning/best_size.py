"""The best size for so many operations, by the three ways of arXiv:2203.15556 side by side, in words."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxscale.planning.envelope import Curve, envelope
from jaxscale.planning.isoflop import SizeLaw, parabolas
from jaxscale.planning.loss_law import LossLaw, Point, fit
from jaxscale.system.exits import BadInput
from jaxscale.units import count

CURVES, EQUAL, LOSS = "Approach 1, the envelope of curves", "Approach 2, parabolas at equal FLOPs", "Approach 3, a law"


class Way(NamedTuple):
    """What one way says. text: with its name, or the reason why it says nothing."""

    name: str
    law: SizeLaw | None  # of approaches 1 and 2, where the runs fix one
    text: str


def three_ways(
    points: Sequence[Point],
    curves: Sequence[Curve],
    flops: float,
    *,
    said: str,
    budgets: Sequence[float] = (),
    within: float = 0.1,
    law: LossLaw | None = None,
) -> list[Way]:
    """What each way says of so many operations.

    Args: points: ends of runs. curves: their training. said: what these operations are, such as '10 times the largest
    tried'. budgets, within: of parabolas(). law: of the points, where it is fitted already.
    """
    return [
        of_size(CURVES, lambda: envelope(curves), flops, said),
        of_size(EQUAL, lambda: parabolas(points, budgets=budgets, within=within), flops, said),
        Way(LOSS, None, of_loss(points, flops, law)),
    ]


def of_size(name: str, make: Callable[[], SizeLaw], flops: float, said: str) -> Way:
    """What a SizeLaw says of so many operations."""
    try:
        law = make()
    except BadInput as error:
        return Way(name, None, f"{name}: {error}.")
    a, size, tokens = law.params_exponent, law.params(flops), law.tokens(flops)
    return Way(
        name,
        law,
        f"{name}: the best size grows as C ** {a.middle:.2f} ({a.low:.2f} to {a.high:.2f}); at {flops:.2g} FLOPs, "
        f"{said}, it is {count(size.middle)} ({count(size.low)} to {count(size.high)}) parameters and "
        f"{count(tokens.middle)} tokens.",
    )


def of_loss(points: Sequence[Point], flops: float, law: LossLaw | None = None) -> str:
    """Approach 3 in words: the law of the loss, and the best size by it."""
    try:
        law = law or fit(points)
    except BadInput as error:
        return f"{LOSS} of the loss: {error}."
    terms = law.terms
    if not (terms.A and terms.B):
        return f"{LOSS} of the loss: the runs tell of {law.form} alone, and a best size needs both."
    exponent = terms.beta / (terms.alpha + terms.beta)
    log_ratio = math.log(terms.alpha * terms.A / (terms.beta * terms.B)) / (terms.alpha + terms.beta)
    log_params = log_ratio + exponent * math.log(flops / 6)
    text = (
        f"{LOSS} of the loss: L = {terms.E:.3g} + {terms.A:.3g} / N ** {terms.alpha:.2f} + {terms.B:.3g} / "
        f"D ** {terms.beta:.2f}, so the best size grows as C ** {exponent:.2f}; at {flops:.2g} FLOPs "
    )
    if not 0 <= log_params <= math.log(flops / 6):
        return f"{text}it gives less than one parameter or one token: these runs determine no best size."
    params = math.exp(log_params)
    loss = law.predict(params, flops / 6 / params)
    return f"{text}it is {count(params)} parameters, with {loss.middle:.3f} nats ({loss.low:.3f} to {loss.high:.3f})."
