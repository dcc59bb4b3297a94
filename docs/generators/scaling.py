"""What docs/scaling_laws.md computes with: constants of the code, and cases that the page must give back."""

import json
from typing import Any

from jaxscale.kernels.hardware import CHIPS
from jaxscale.tools.planning import cost, scaling
from jaxscale.tools.planning.published_mfu import published_mfu

# That paper's own fit does not give its optimum back, which the other explains and repairs: shown beside it.
HOFFMANN = scaling.Terms(1.69, 406.4, 410.7, 0.34, 0.28)
LAWS = {"besiroglu": scaling.BESIROGLU, "hoffmann": HOFFMANN}
SOURCES = {"besiroglu": scaling.BESIROGLU_SOURCE, "hoffmann": "arXiv:2203.15556, equation 10"}
CASES = [(1e20, 5e8), (3.14e23, 1.75e11), (6e23, 7e10), (1e24, 8e9), (1e26, 1e12)]  # FLOPs and parameters


def content() -> dict[str, Any]:
    """Plain data for the page."""
    return {
        "laws": {name: law._asdict() | {"source": SOURCES[name]} for name, law in LAWS.items()},
        "tokens_per_param": scaling.TOKENS_PER_PARAM,
        "smallest_fitted": scaling.SMALLEST_FITTED,
        "goodput": cost.GOODPUT,
        "chips": [
            {
                "name": chip.name,
                "peak_flops": chip.peak_flops * chip.devices_per_chip,
                "price": chip.price.dollars_per_hour if chip.price else None,
                "price_date": chip.price.date if chip.price else None,
                "mfu": list(published_mfu(chip)[0]),
            }
            for chip in CHIPS.values()
        ],
        "cases": [case(flops, params, name) for flops, params in CASES for name in LAWS],
    }


def case(flops: float, params: float, name: str) -> dict[str, Any]:
    """What the planner's own functions say of a model that is trained with so many operations."""
    law, tokens = LAWS[name], flops / scaling.train_flops(params, 1)
    loss = law.loss(params, tokens)
    best = scaling.optimal_params(flops)
    return {
        "law": name,
        "flops": flops,
        "params": params,
        "tokens": tokens,
        "loss": loss,
        "optimal_params": best,
        "optimal_tokens": scaling.optimal_tokens(best),
        "half_size_tokens": scaling.tokens_for_loss(params / 2, loss, law),
        "dollars": flops / (0.4 * 312e12 * cost.GOODPUT) / cost.HOUR * 2.0,
    }


def script() -> str:
    """The data as a script: a page that was opened from a disk may fetch no JSON."""
    return f"window.scalingData = {json.dumps(content(), indent=1)}\n"
