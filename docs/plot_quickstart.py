"""Draws docs/quickstart.svg, the curves of the quick start, from what it wrote: python docs/plot_quickstart.py"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams |= {"svg.hashsalt": "quickstart", "svg.fonttype": "none"}  # the same file for the same numbers
from matplotlib import pyplot as plt  # noqa: E402

HERE = pathlib.Path(__file__).parent
RUN = HERE.parent / "runs" / "quickstart"
GREY = "#808080"  # readable on light and on dark pages


def main(run: pathlib.Path) -> None:
    """Writes the picture."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figure, left = plt.subplots(figsize=(7.2, 3.0), layout="constrained")
    for name, label, colour in (
        ("loss", "training loss [nats per token]", "#3b82d6"),
        ("validation/bits_per_byte", "validation [bits per byte]", "#e0813a"),
    ):
        points = [(line["step"], line[name]) for line in lines if name in line]
        steps, values = zip(*points)
        left.plot(steps, values, color=colour, label=label, marker="o" if len(points) < 20 else None, markersize=3)
        left.annotate(
            f"{values[-1]:.2f}", (steps[-1], values[-1]), xytext=(5, 0), textcoords="offset points", color=colour
        )
    left.set(xlabel="step", xlim=(0, 1.08 * lines[-1]["step"]), ylim=(0, None))
    left.legend(frameon=False, labelcolor=GREY)
    left.grid(alpha=0.2)
    left.tick_params(colors=GREY)
    left.xaxis.label.set_color(GREY)
    for spine in left.spines.values():
        spine.set_color(GREY)
    figure.savefig(HERE / "quickstart.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if sys.argv[1:] else RUN)
