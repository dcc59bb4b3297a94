"""The compute-optimal size by the three approaches of arXiv:2203.15556, as text."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.envelope import Curve, envelope
from jaxscale.tools.planning.isoflop import SizeLaw, parabolas
from jaxscale.tools.planning.loss_law import LossLaw, Point, fit
from jaxscale.units import count

CURVES, EQUAL, LOSS = "Approach 1, the envelope of curves", "Approach 2, parabolas at equal FLOPs", "Approach 3, a law"


class Approach(NamedTuple):
    """The result of one approach. text: with its name, or why it has no result."""

    name: str
    law: SizeLaw | None  # of approaches 1 and 2, if the runs determine one
    text: str


def three_approaches(
    points: Sequence[Point],
    curves: Sequence[Curve],
    flops: float,
    *,
    description: str,
    budgets: Sequence[float] = (),
    within: float = 0.1,
    law: LossLaw | None = None,
) -> list[Approach]:
    """Returns the result of each approach for this many FLOPs.

    Args: points: ends of runs. curves: their training. description: of these FLOPs, such as '10 times the largest
    tried'. budgets, within: of parabolas(). law: of the points, if already fitted.
    """
    found = []
    for name, make in (
        (CURVES, lambda: envelope(curves)),
        (EQUAL, lambda: parabolas(points, budgets=budgets, within=within)),
    ):
        try:
            size_law = make()
        except BadInput as error:
            found.append(Approach(name, None, f"{name}: {error}."))
            continue
        a, size, tokens = size_law.params_exponent, size_law.params(flops), size_law.tokens(flops)
        text = (
            f"{name}: the best size grows as C ** {a.middle:.2f} ({a.low:.2f} to {a.high:.2f}); at {flops:.2g} FLOPs, "
            f"{description}, it is {count(size.middle)} ({count(size.low)} to {count(size.high)}) parameters and "
            f"{count(tokens.middle)} tokens."
        )
        found.append(Approach(name, size_law, text))
    return [*found, Approach(LOSS, None, loss_law_text(points, flops, law))]


def loss_law_text(points: Sequence[Point], flops: float, law: LossLaw | None = None) -> str:
    """Returns approach 3 as text: the loss law, and its compute-optimal size."""
    try:
        law = law or fit(points)
    except BadInput as error:
        return f"{LOSS} of the loss: {error}."
    terms = law.terms
    if not (terms.A and terms.B):
        return f"{LOSS} of the loss: the runs determine {law.form} only, and a best size needs both."
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
