"""Table of experiments by name."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxscale.tools.lab import batch, clipping, isoflop, ladder, optimizers, precision, rate, resume, shape, vary, width
from jaxscale.tools.lab.experiment import Conclusion, Experiment, Options, Run
from jaxscale.tools.lab.trial import Base, Result, Trial


def of(
    trials: Callable[[Base, Options], list[Trial]],
    conclude: Callable[[Sequence[Result]], Conclusion],
    key: Callable[[Result], Any] | None = None,
) -> Callable[[Base, Options, Run], Conclusion]:
    """Returns the function that runs trials and concludes. key: of groups that get further rates, see rate.inside()."""

    def answer(base: Base, options: Options, run: Run) -> Conclusion:
        results = run(trials(base, options))
        return conclude(rate.inside(results, options, run, key) if key else results)

    return answer


EXPERIMENTS = {
    "rate": Experiment(
        "the best rate of each batch", "How does the best rate go with the batch?",
        of(rate.rate_trials, rate.conclude, lambda r: (r.at(rate.OPTIMIZER), r.at(rate.BATCH)))),
    "batch": Experiment("what a larger batch costs", "How large a batch pays?", batch.answer),
    "optimizers": Experiment(
        "each at its own best rate", "Which optimizer needs the fewest tokens?",
        of(optimizers.optimizer_trials, optimizers.conclude, lambda r: r.at(rate.OPTIMIZER))),
    "precision": Experiment(
        "float32, bfloat16, float16, int8, fp8", "What does each precision lose?",
        of(precision.precision_trials, precision.conclude)),
    "clipping": Experiment(
        "rates up to where runs diverge", "What does clipping allow?", of(clipping.clipping_trials, clipping.conclude)),
    "isoflop": Experiment(
        "size against tokens at equal FLOPs", "Which size is best for the FLOPs?",
        of(isoflop.isoflop_trials, isoflop.conclude)),
    "ladder": Experiment(
        "what small runs say of a larger one, and what it ends at", "Do small runs foretell a larger one?",
        ladder.answer),
    "shape": Experiment(
        "depth against width at equal FLOPs", "How deep and how wide for the FLOPs?",
        of(shape.shape_trials, shape.conclude, lambda r: r.at(shape.LAYERS))),
    "resume": Experiment(
        "kill, resume, compare", "Is a run that was killed the same run?", of(resume.resume_trials, resume.conclude)),
    "width": Experiment("rates over widths, with muP and without", "Does a rate hold over widths?", width.answer),
    "vary": Experiment("your own sweep, by --vary", "Which setting is best?", of(vary.vary_trials, vary.conclude)),
}  # fmt: skip
