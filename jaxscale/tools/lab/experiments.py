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
    """Returns a function that runs trials and returns the Conclusion. key: groups for rate.inside()."""

    def answer(base: Base, options: Options, run: Run) -> Conclusion:
        results = run(trials(base, options))
        return conclude(rate.inside(results, options, run, key) if key else results)

    return answer


EXPERIMENTS = {
    "rate": Experiment(
        "best learning rate for each batch size", "How does the best learning rate depend on the batch size?",
        of(rate.rate_trials, rate.conclude, lambda r: (r.at(rate.OPTIMIZER), r.at(rate.BATCH)))),
    "batch": Experiment("tokens to a loss over batch size", "What is the critical batch size?", batch.answer),
    "optimizers": Experiment(
        "each optimizer at its best learning rate", "Which optimizer needs the fewest tokens?",
        of(optimizers.optimizer_trials, optimizers.conclude, lambda r: r.at(rate.OPTIMIZER))),
    "precision": Experiment(
        "float32, bfloat16, float16, int8, fp8", "How much does each precision raise the loss?",
        of(precision.precision_trials, precision.conclude)),
    "clipping": Experiment(
        "highest stable learning rate with and without clipping", "Does clipping allow higher learning rates?",
        of(clipping.clipping_trials, clipping.conclude)),
    "isoflop": Experiment(
        "model size against tokens at equal FLOPs", "Which model size is best for a FLOP budget?",
        of(isoflop.isoflop_trials, isoflop.conclude)),
    "ladder": Experiment(
        "predicted and measured loss of a larger run", "Do small runs predict a larger one?",
        ladder.answer),
    "shape": Experiment(
        "depth against width at equal FLOPs", "Which depth and width are best for a FLOP budget?",
        of(shape.shape_trials, shape.conclude, lambda r: r.at(shape.LAYERS))),
    "resume": Experiment(
        "kill, resume, compare", "Does a killed run resume bit for bit?", of(resume.resume_trials, resume.conclude)),
    "width": Experiment(
        "learning rates over widths, with and without muP", "Does the best learning rate transfer across widths?",
        width.answer),
    "vary": Experiment("your own sweep, with --vary", "Which setting is best?", of(vary.vary_trials, vary.conclude)),
}  # fmt: skip
