"""Published MFU of large runs with sources, which `plan` uses without a measurement.

MFU is the model's FLOP/s divided by the dense bfloat16 peak in kernels/hardware.py. Published TFLOP/s are divided by
this peak. From published chip-hours, the FLOP/s are 6 N D / chip-hours, which omits attention and includes lost time.
8-bit runs are omitted. tests/planning/test_reached.py checks the arithmetic.
"""

from typing import NamedTuple

from jaxscale.kernels.hardware import CHIPS, Chip
from jaxscale.tools.planning.cost import Range

MAXTEXT = "github.com/AI-Hypercomputer/maxtext, MaxText/configs/{}/README.md"
RECIPES = "github.com/AI-Hypercomputer/tpu-recipes at c8cfe2f, training/"
BY_HOURS = "6 N D over the GPU-hours of "
LLAMA, LLAMA2 = BY_HOURS + "arXiv:2302.13971, table 15", BY_HOURS + "arXiv:2307.09288, table 2"
MEGATRON = "github.com/NVIDIA/Megatron-LM, README.md"
BRIDGE = "docs.nvidia.com/nemo/megatron-bridge, performance summary 25.11, routing forced to balance"


class MfuRow(NamedTuple):
    """MFU of one published run, or the range of several similar runs."""

    chip: str  # Chip.name
    run: str  # model and number of chips
    low: float
    high: float
    source: str
    mixture: bool = False  # True for a mixture of experts, with MFU by active parameters


ROWS = (
    MfuRow("TPU v4", "PaLM 540B, 6,144 chips", 0.462, 0.462, "arXiv:2204.02311, table 3"),
    MfuRow("TPU v4", "22B, 64 to 512 chips", 0.532, 0.567, MAXTEXT.format("v4")),
    MfuRow("TPU v4", "52B, 192 and 384 chips", 0.560, 0.589, MAXTEXT.format("v4")),
    MfuRow("TPU v5e", "16B, 256 to 8,192 chips", 0.547, 0.611, MAXTEXT.format("v5e")),
    MfuRow("TPU v5e", "32B, 256 to 8,192 chips", 0.604, 0.669, MAXTEXT.format("v5e")),
    MfuRow("TPU v5e", "64B, 256 to 8,192 chips", 0.502, 0.599, MAXTEXT.format("v5e")),
    MfuRow("TPU v5e", "128B, 256 to 8,192 chips", 0.463, 0.561, MAXTEXT.format("v5e")),
    MfuRow("TPU v5p", "32B, 64 and 128 chips", 0.694, 0.715, MAXTEXT.format("v5p")),
    MfuRow("TPU v5p", "64B, 64 and 128 chips", 0.673, 0.703, MAXTEXT.format("v5p")),
    MfuRow("TPU v5p", "128B, 128 to 512 chips", 0.597, 0.688, MAXTEXT.format("v5p")),
    MfuRow("TPU v5p", "256B, 512 and 1,024 chips", 0.630, 0.671, MAXTEXT.format("v5p")),
    MfuRow("TPU v5p", "512B, 512 and 1,024 chips", 0.615, 0.640, MAXTEXT.format("v5p")),
    MfuRow("TPU v5p", "1024B, 1,024 to 4,096 chips", 0.516, 0.648, MAXTEXT.format("v5p")),
    MfuRow("TPU v5p", "Llama 3.1 405B, 512 chips", 0.685, 0.685, RECIPES + "v5p/Llama3.1-405B-MaxText"),
    MfuRow("TPU v5p", "Mixtral 8x7B, 64 chips", 0.549, 0.549,
            "github.com/AI-Hypercomputer/maxtext, end_to_end/tpu/mixtral/Run_Mixtral.md", True),
    MfuRow("TPU v5p", "Llama 4 Scout, 128 to 512 chips", 0.491, 0.491,
            RECIPES + "v5p/Llama4-Scout-17B-16E-Maxtext", True),
    MfuRow("TPU v5p", "Llama 4 Maverick, 128 chips", 0.349, 0.349,
            RECIPES + "v5p/Llama4-Maverick-17B-128E-Maxtext", True),
    MfuRow("TPU v5p", "DeepSeek-V3, 512 chips", 0.332, 0.332, RECIPES + "v5p/DeepSeek3-671B-MaxText", True),
    MfuRow("TPU v6e", "Llama 3.1 8B, 8 to 256 chips", 0.444, 0.457, RECIPES + "trillium/Llama3.1-8B-MaxText"),
    MfuRow("TPU v6e", "Llama 2 70B, 256 chips", 0.438, 0.438, RECIPES + "trillium/Llama2-70B-MaxText"),
    MfuRow("TPU v6e", "Llama 3.1 70B, 32 to 256 chips", 0.460, 0.504, RECIPES + "trillium/Llama3.1-70B-MaxText"),
    MfuRow("TPU v6e", "GPT-3 175B, 256 chips", 0.419, 0.419, RECIPES + "trillium/GPT3-175B-MaxText/bf16"),
    MfuRow("TPU v6e", "Llama 3.1 405B, 512 chips", 0.428, 0.428, RECIPES + "trillium/Llama3.1-405B-MaxText"),
    MfuRow("TPU v6e", "Gemma 3 12B, 256 chips", 0.381, 0.381, RECIPES + "trillium/Gemma3-12B-MaxText/v6e-256"),
    MfuRow("TPU v6e", "Gemma 3 12B, 512 and 1,024 chips", 0.332, 0.357,
            RECIPES + "trillium/Gemma3-12B-MaxText/2x-v6e-256 and 4x-v6e-256"),
    MfuRow("TPU v6e", "Mixtral 8x7B, 256 chips", 0.329, 0.329, RECIPES + "trillium/Mixtral-8x7B-MaxText", True),
    MfuRow("TPU v6e", "Mixtral 8x22B, 256 chips", 0.362, 0.362, RECIPES + "trillium/Mixtral-8x22B-MaxText", True),
    MfuRow("TPU7x", "Llama 3.1 70B, 64 and 256 chips", 0.520, 0.523, RECIPES + "ironwood/README.md"),
    MfuRow("TPU7x", "Llama 3.1 70B, rows of 131,072, 256 chips", 0.389, 0.389, RECIPES + "ironwood/README.md"),
    MfuRow("TPU7x", "Llama 3.1 405B, 256 chips", 0.547, 0.547, RECIPES + "ironwood/README.md"),
    MfuRow("TPU7x", "Gemma 4 2B, 4B and 31B, 64 chips", 0.387, 0.459, RECIPES + "ironwood/README.md"),
    MfuRow("TPU7x", "Gemma 4 26B, 64 and 256 chips", 0.257, 0.257, RECIPES + "ironwood/README.md", True),
    MfuRow("TPU7x", "DeepSeek-V3, 128 and 256 chips", 0.263, 0.266, RECIPES + "ironwood/README.md", True),
    MfuRow("TPU7x", "Qwen3 235B-A22B, 256 chips", 0.273, 0.273, RECIPES + "ironwood/README.md", True),
    MfuRow("TPU7x", "gpt-oss-120b, 64 and 256 chips", 0.143, 0.143, RECIPES + "ironwood/README.md", True),
    MfuRow("A100 80GB", "LLaMA 7B", 0.437, 0.437, LLAMA),
    MfuRow("A100 80GB", "LLaMA 13B", 0.514, 0.514, LLAMA),
    MfuRow("A100 80GB", "LLaMA 33B", 0.459, 0.459, LLAMA),
    MfuRow("A100 80GB", "LLaMA 65B, 2,048 cards", 0.476, 0.476,
            "6 N x 380 tokens/s per GPU: arXiv:2302.13971, section 2.4"),
    MfuRow("A100 80GB", "Llama 2 7B", 0.391, 0.391, LLAMA2),
    MfuRow("A100 80GB", "Llama 2 13B", 0.377, 0.377, LLAMA2),
    MfuRow("A100 80GB", "Llama 2 34B", 0.347, 0.347, LLAMA2),
    MfuRow("A100 80GB", "Llama 2 70B", 0.428, 0.428, LLAMA2),
    MfuRow("A100 80GB", "530B, 2,240 cards", 0.542, 0.542, "arXiv:2205.05198, abstract"),
    MfuRow("H100 SXM", "Llama 3 405B, 8,192 and 16,384 cards", 0.38, 0.43, "arXiv:2407.21783, table 4"),
    MfuRow("H100 SXM", "2B to 462B, up to 6,144 cards", 0.41, 0.48, MEGATRON),
    MfuRow("H100 SXM", "GPT-3 175B, 96 to 4,608 cards", 0.42, 0.47, MEGATRON),
    MfuRow("H100 SXM", "Mixtral 8x7B", 0.473, 0.473, "docs.nvidia.com/megatron-core, mixture of experts, v0.9", True),
    MfuRow("H100 SXM", "Mixtral 8x22B", 0.493, 0.493, "arXiv:2504.14960, abstract", True),
    MfuRow("H100 SXM", "Qwen2 57B-A14B", 0.390, 0.390, "arXiv:2504.14960, abstract", True),
    MfuRow("H100 SXM", "gpt-oss-120b, 64 cards", 0.155, 0.155, BRIDGE, True),
)  # fmt: skip

# Range for chips without published runs on their architecture. Deliberately wide, not measured.
ASSUMED = Range(0.1, 0.6)


def published_rows(chip: Chip, mixture: bool = False) -> tuple[MfuRow, ...]:
    """Returns published runs on this chip or, if there are none, on chips of the same architecture."""
    names = {other.name for other in CHIPS.values() if chip.architecture and other.architecture == chip.architecture}
    select = lambda chips: tuple(row for row in ROWS if row.chip in chips and row.mixture == mixture)
    return select({chip.name}) or select(names)


def published_mfu(chip: Chip, mixture: bool = False) -> tuple[Range, str]:
    """Returns (MFU range, source as text). The range is ASSUMED if there are no published runs."""
    kind = "mixtures of experts" if mixture else "dense models"
    rows = published_rows(chip, mixture)
    if not rows:
        assumed = (
            f"no published MFU is known for {kind} on {chip.name}; {ASSUMED.low:.0%} to {ASSUMED.high:.0%} is assumed"
        )
        return ASSUMED, f"{assumed}: measure it with `jaxscale bench step --save` on such a chip, or pass --mfu"
    low, high = min(rows, key=lambda row: row.low), max(rows, key=lambda row: row.high)
    source = f"{low.low:.1%} to {high.high:.1%}: published for {kind} on {rows[0].chip}"
    if rows[0].chip != chip.name:
        source += f", which has the architecture of {chip.name}"
    return Range(low.low, high.high), f"{source}; {low.run} ({low.source}) and {high.run} ({high.source})"
