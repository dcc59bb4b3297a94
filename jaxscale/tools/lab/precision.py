"""Comparison of compute dtypes with float32: loss differences, and failures of float16 without loss scaling."""

from collections.abc import Sequence

from jaxscale.system.exits import BadInput
from jaxscale.tools.lab.estimate import Estimate, mean
from jaxscale.tools.lab.experiment import SMALL, SMOOTHED, Conclusion, Options, banded, curves_of, drawing
from jaxscale.tools.lab.trial import Base, Result, Trial, groups_of
from jaxscale.tools.reporting.axes import smooth
from jaxscale.tools.reporting.page_tables import n
from jaxscale.tools.reporting.page_text import percent, plain
from jaxscale.tools.reporting.plots import PlotLine, color_of

FORM, LOSS_SCALE, COMPUTE = "precision", "train/loss_scale", "model.compute_dtype"
FIRST, DYNAMIC = "float32", "float16 dynamic scale"  # without commas, which separate --names
# Initial loss scale that overflows at once, so that its plot shows dynamic scaling. 2**24 overflowed in only two of
# three seeds of configs/lab.py, and not before step 41 (2026-11-26, jax 0.10.2).
OVERFLOWS = 2.0**28
FORMS = {
    FIRST: {COMPUTE: FIRST},
    "bfloat16": {COMPUTE: "bfloat16"},
    DYNAMIC: {COMPUTE: "float16", "train.loss_scale.initial": OVERFLOWS, "train.loss_scale.max": OVERFLOWS},
    "float16 no scale": {COMPUTE: "float16", "train.loss_scale.mode": "static", "train.loss_scale.initial": 1},
    "int8 products": {COMPUTE: "bfloat16", "model.matmul_dtype": "int8"},
    "fp8 products": {COMPUTE: "bfloat16", "model.matmul_dtype": "fp8"},
}
PREDICTED = (
    (
        "arXiv:1710.03740",
        "float16 needs loss scaling, since gradients below 6e-8 become 0; with it, losses are equal",
    ),
    ("arXiv:1905.12322", "bfloat16 has float32's range and needs no loss scaling"),
    ("arXiv:2412.19437, section 3.3", "FP8 training stays within 0.25% of bfloat16's loss"),
)


def precision_trials(base: Base, options: Options) -> list[Trial]:
    """Returns trials of precisions x seeds. Raises BadInput for an unknown precision."""
    for name in options.names:
        if name not in FORMS:
            raise BadInput(f"--names has {name!r}, which is not a precision; use {', '.join(FORMS)}")
    names = dict.fromkeys([FIRST, *(options.names or FORMS)])
    return [base.with_settings(FORMS[name], seed, at={FORM: name}) for name in names for seed in options.seeds_of(3)]


def conclude(results: Sequence[Result]) -> Conclusion:
    """Returns the Conclusion of these results. Differences are between runs of the same seed."""
    by_form = groups_of(results, lambda r: r.at(FORM))
    exact = {r.seed: r for r in by_form[FIRST] if not r.diverged}
    verdict, rows, curves, scales = [], [], [], []
    for place, (name, runs) in enumerate(by_form.items()):
        skipped = sum(r.history.latest("skipped_total") or 0 for r in runs)
        lost = sum(r.diverged for r in runs)
        off = [r.loss / exact[r.seed].loss - 1 for r in runs if not r.diverged and r.seed in exact]
        gap = mean(off) if off else None
        if name != FIRST:
            trace = f"; {scale_text(runs)}" if name == DYNAMIC else ""
            verdict.append(f"With {name}: {in_words(gap, lost, len(runs), skipped)}{trace}.")
            shown = [r for r in runs if not r.diverged] or runs[:1]
            curves += banded([line_above(name, r, exact[r.seed], place) for r in shown if r.seed in exact])
        found = [r.loss for r in runs if not r.diverged]
        rows.append([
            name, n(str(mean(found)) if found else "none"),
            n("" if name == FIRST or not gap else signed(gap)), n(f"{lost} of {len(runs)}"), n(plain(skipped)),
        ])  # fmt: skip
        if name.startswith("float16"):
            scales += curves_of(name, runs, place, LOSS_SCALE)
    drawings = [drawing("Training loss above float32, same seed, smoothed", curves, "tokens", unit="%", zero=True)]
    if scales:
        drawings.append(drawing("The loss scale", scales, "tokens", log=True))
    head = ("precision", "held-out loss", "relative to float32, same seed", "diverged", "steps skipped")
    limits = (
        *SMALL, "Speed is not compared, since many machines emulate some types; see jaxscale bench step --dtype.",
        "Underflow increases with depth and training length; a small model may not show it.",
    )  # fmt: skip
    return Conclusion(verdict, limits, PREDICTED, drawings, head, rows)


def line_above(name: str, run: Result, exact: Result, place: int) -> PlotLine:
    """Returns the percentage by which the training loss exceeds that of the float32 run with the same batches."""
    other = dict(zip(*exact.curve()))
    points = [(tokens, loss / other[tokens] - 1) for tokens, loss in zip(*run.curve()) if tokens in other]
    percents = smooth([100 * off for _, off in points], max(1, len(points) // SMOOTHED))
    return PlotLine(name, [tokens for tokens, _ in points], percents, color_of(place))


def scale_text(runs: Sequence[Result]) -> str:
    """Returns text such as 'the loss scale fell from 2.68e+08 to between 4.19e+06 and 8.39e+06'."""
    ends = [values[-1] for r in runs if (values := r.curve(LOSS_SCALE)[1])]
    if not ends:
        return "no loss scale was logged"
    if min(ends) >= OVERFLOWS:
        return f"the loss scale did not fall from its initial {OVERFLOWS:.3g}"
    low, high = f"{min(ends):.3g}", f"{max(ends):.3g}"
    return f"the loss scale fell from {OVERFLOWS:.3g} to {low if low == high else f'between {low} and {high}'}"


def signed(change: Estimate) -> str:
    """Returns a relative difference as text, such as '+0.12% (-0.05% to 0.3%)'."""
    between = f" ({percent(change.low)} to {percent(change.high)})" if change.low is not None else ""
    return f"{'+' if change.value >= 0 else ''}{percent(change.value)}{between}"


def in_words(change: Estimate | None, lost: int, runs: int, skipped: float) -> str:
    """Returns text about the difference from float32, its significance, skipped steps and diverged runs."""
    failed = f"{lost} of {runs} runs diverged" if lost else ""
    if change is None:
        return failed or "the float32 runs diverged, so the reference is missing"
    if change.low is None:
        note = "one seed gives no interval"
    else:
        note = "not significantly different" if change.has(0.0) else "worse" if change.value > 0 else "better"
    skips = f"; {skipped:,.0f} steps were skipped because of non-finite gradients" if skipped else ""
    return f"{signed(change)} compared with float32 and the same seed: {note}{skips}{'; ' + failed if failed else ''}"
