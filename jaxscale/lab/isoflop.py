"""Model size against tokens at equal FLOPs: the three ways of arXiv:2203.15556 to the best size, side by side."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxscale.config import RunConfig
from jaxscale.lab.experiment import SMALL, Conclusion, Run, Wishes, drawing, line
from jaxscale.lab.rate import RATE, floor_of
from jaxscale.lab.trial import Base, Result, Trial
from jaxscale.planning import isoflop, loss_law
from jaxscale.planning.loss_law import Point
from jaxscale.reporting.tables import n
from jaxscale.reporting.text import count
from jaxscale.system.exits import BadInput

SIZE, BUDGET = "width", "FLOPs"
WIDTHS = (0.5, 1, 1.5, 2, 3)  # times the config's
BUDGETS = (0.25, 0.5, 1.0, 2.0)  # times the FLOPs of the config's own run
FARTHER = 10.0  # times the largest budget: what the laws say of it is told
PREDICTED = (
    ("arXiv:2203.15556", "the best size and the tokens grow alike, as C ** 0.50 and C ** 0.50 (approach 1)"),
    ("arXiv:2404.10102", "the same data, fitted again: C ** 0.51 (approach 3)"),
    ("arXiv:2001.08361", "the best size grows as C ** 0.73; later work traces that to schedules and to small models"),
)


def wider(cfg: RunConfig, times: float) -> dict[str, Any]:
    """The settings of a model `times` as wide: heads of one size, the same ratios, the rate by width.

    Raises BadInput for a model that is no decoder of the Llama kind.
    """
    model = cfg.model
    if model.name != "llama" or getattr(model, "experts", None) is not None:
        raise BadInput(f"lab isoflop varies dense models of model.name='llama', and this one is {model.name!r}")
    heads = max(1, round(model.num_heads * times))
    groups = max(1, round(model.num_kv_heads * heads / model.num_heads))
    groups = next(g for g in range(groups, 0, -1) if heads % g == 0)
    factor = heads / model.num_heads
    return {
        "model.num_heads": heads,
        "model.num_kv_heads": groups,
        "model.embed_dim": round(model.embed_dim * factor),
        "model.mlp_dim": round(model.mlp_dim * factor),
        RATE: cfg.optim.peak_lr / factor,
    } | floor_of(cfg.optim, cfg.optim.peak_lr / factor)


def isoflop_trials(base: Base, wishes: Wishes) -> list[Trial]:
    """Budgets x sizes x seeds; a run's tokens are what its budget pays for."""
    from_base = base.with_settings({}).cfg
    tokens = from_base.train_tokens if isinstance(from_base.train_tokens, int) else None
    if tokens is None:
        raise BadInput(f"lab isoflop needs train_tokens as a number, not {from_base.train_tokens!r}")
    found = []
    for part in BUDGETS:
        flops = part * tokens * from_base.flops_per_token
        for times in WIDTHS:
            settings = wider(base.cfg, times)
            sized = base.with_settings(settings).cfg
            steps = max(1, round(flops / sized.flops_per_token / sized.tokens_per_step))
            settings["train_tokens"] = steps * sized.tokens_per_step
            at = {SIZE: sized.model.embed_dim, BUDGET: flops}
            found += [base.with_settings(settings, seed, at=at) for seed in wishes.seeds_of(1)]
    return found


def point_of(result: Result) -> Point:
    """The end of a run, as laws take it."""
    cfg = result.trial.cfg
    tokens = result.history.latest("tokens_seen") or 0
    return Point(cfg.model.num_params, tokens, result.loss, result.folder, cfg.flops_per_token * tokens)


def answer(base: Base, wishes: Wishes, run: Run) -> Conclusion:
    """How the best size grows with FLOPs."""
    return conclude(run(isoflop_trials(base, wishes)))


def conclude(results: Sequence[Result]) -> Conclusion:
    """The Conclusion of these results."""
    held = [(r, point_of(r)) for r in results if not r.diverged]
    points, budgets = [point for _, point in held], sorted({float(r.at(BUDGET)) for r, _ in held})
    # A point on the way of a decaying schedule is no end (arXiv:2203.15556, appendix B): a size's curve is of its ends.
    ends = [point._replace(run="") for point in points]
    verdict, bests = [], []
    for name, fit in (
        ("Approach 1, the envelope", lambda: isoflop.envelope(ends)),
        ("Approach 2, parabolas at equal FLOPs", lambda: isoflop.parabolas(points, budgets=budgets, within=0.25)),
    ):
        law, text = of_size(name, fit, FARTHER * budgets[-1])
        verdict.append(text)
        if law is not None:
            bests.append((name, {o.flops: o.params for o in law.optima}))
    verdict.append(of_loss(points, FARTHER * budgets[-1]))
    of_budget = lambda flops: [(p.params, p.loss) for r, p in held if float(r.at(BUDGET)) == flops]
    drawings = [
        drawing(
            "Loss over size, at equal FLOPs",
            [line(f"{flops:.2g} FLOPs", of_budget(flops), place) for place, flops in enumerate(budgets)],
            "parameters", log_below=True, unit="nats, held out",
        ),
        drawing(
            "Best size", [line(name, best, place, "dots") for place, (name, best) in enumerate(bests)],
            "FLOPs", log_below=True, log=True, numbers="count",
        ),
    ]  # fmt: skip
    texts = lambda flops, p: (
        f"{flops:.3g}", count(p.params), count(p.tokens), f"{p.tokens / p.params:.1f}", f"{p.loss:.4f}"
    )  # fmt: skip
    rows = [list(map(n, texts(float(r.at(BUDGET)), p))) for r, p in held]
    lost = len(results) - len(held)
    limits = (*SMALL, "Rates go with the inverse of the width and were tuned at one size alone.")
    if lost:
        limits = (*limits, f"{lost} of {len(results)} runs diverged and are left out.")
    head = ("FLOPs", "parameters", "tokens", "tokens a parameter", "held-out loss")
    return Conclusion(verdict, limits, PREDICTED, drawings, head, rows)


def of_size(name: str, fit: Callable[[], isoflop.SizeLaw], far: float) -> tuple[isoflop.SizeLaw | None, str]:
    """(the law, it in words); None and the reason where the runs do not fix one."""
    try:
        law = fit()
    except BadInput as error:
        return None, f"{name}: {error}."
    a, size, tokens = law.params_exponent, law.params(far), law.tokens(far)
    return law, (
        f"{name}: the best size grows as C ** {a.middle:.2f} ({a.low:.2f} to {a.high:.2f}); at {far:.2g} FLOPs, "
        f"{FARTHER:g} times the largest tried, it is {count(size.middle)} ({count(size.low)} to {count(size.high)}) "
        f"parameters and {count(tokens.middle)} tokens."
    )


def of_loss(points: Sequence[Point], far: float) -> str:
    """Approach 3 in words: the law of the loss, and the best size by it."""
    try:
        law = loss_law.fit(points)
    except BadInput as error:
        return f"Approach 3, a law of the loss: {error}."
    terms = law.terms
    if not (terms.A and terms.B):
        return f"Approach 3, a law of the loss: the runs tell of {law.form} alone, and a best size needs both."
    exponent = terms.beta / (terms.alpha + terms.beta)
    ratio = (terms.alpha * terms.A / (terms.beta * terms.B)) ** (1 / (terms.alpha + terms.beta))
    params = ratio * (far / 6) ** exponent
    loss = law.predict(params, far / 6 / params)
    return (
        f"Approach 3, a law of the loss: L = {terms.E:.3g} + {terms.A:.3g} / N ** {terms.alpha:.2f} + {terms.B:.3g} / "
        f"D ** {terms.beta:.2f}, so the best size grows as C ** {exponent:.2f}; at {far:.2g} FLOPs it is "
        f"{count(params)} parameters, with {loss.middle:.3f} nats ({loss.low:.3f} to {loss.high:.3f})."
    )
