"""Table of experiments by name."""

from jaxscale.tools.lab import batch, clipping, isoflop, ladder, optimizers, precision, rate, resume, shape, vary, width
from jaxscale.tools.lab.experiment import Experiment

EXPERIMENTS = {
    "rate": Experiment("the best rate of each batch", "How does the best rate go with the batch?", rate.answer),
    "batch": Experiment("what a larger batch costs", "How large a batch pays?", batch.answer),
    "optimizers": Experiment(
        "each at its own best rate", "Which optimizer needs the fewest tokens?", optimizers.answer
    ),
    "precision": Experiment(
        "float32, bfloat16, float16, int8, fp8", "What does each precision lose?", precision.answer
    ),
    "clipping": Experiment("rates up to where runs diverge", "What does clipping allow?", clipping.answer),
    "isoflop": Experiment("size against tokens at equal FLOPs", "Which size is best for the FLOPs?", isoflop.answer),
    "ladder": Experiment(
        "what small runs say of a larger one, and what it ends at",
        "Do small runs foretell a larger one?",
        ladder.answer,
    ),
    "shape": Experiment("depth against width at equal FLOPs", "How deep and how wide for the FLOPs?", shape.answer),
    "resume": Experiment("kill, resume, compare", "Is a run that was killed the same run?", resume.answer),
    "width": Experiment("rates over widths, with muP and without", "Does a rate hold over widths?", width.answer),
    "vary": Experiment("your own sweep, by --vary", "Which setting is best?", vary.answer),
}
