"""Draws docs/scale.png from docs/scale.json, which holds what `jaxscale preflight` said: python docs/plot_scale.py"""

import json
import pathlib

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

HERE = pathlib.Path(__file__).parent
PANELS = (
    ("peak_gib", "peak memory of a chip [GiB]"),
    ("sent_gb", "sent by a chip and step [GB]"),
    ("compile_seconds", "compiled in [s]"),
)


def main() -> None:
    """Writes the picture."""
    kept = json.loads((HERE / "scale.json").read_text())
    rows = sorted((row for name, row in kept.items() if name.startswith("growth")), key=lambda row: row["chips"])
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 3.2), layout="constrained")
    for ax, (name, label) in zip(axes, PANELS):
        ax.plot([row["chips"] for row in rows], [row[name] for row in rows], marker="o")
        ax.set(xscale="log", xlabel="chips (TPU v5p)", title=label, ylim=(0, 1.2 * max(row[name] for row in rows)))
        ax.set_xticks([row["chips"] for row in rows], [f"{row['chips']:,}" for row in rows], minor=False, fontsize=8)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    figure.savefig(HERE / "scale.png", dpi=110)


if __name__ == "__main__":
    main()
