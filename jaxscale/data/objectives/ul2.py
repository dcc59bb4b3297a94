"""UL2's mixture of denoisers (arXiv:2205.05131, section 3.1): short spans (R), a text's end (S), or much of it (X).

Each row has one denoiser, and each of its documents begins with a token that tells the mode. It takes the place of the
mark at the end of the inputs.
"""

import dataclasses
from typing import Literal

from jaxscale.data.objectives.span_corruption import LAYOUT_HELP, Layout, check_denoiser, check_rows
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

MODES = ("R", "S", "X")
# Table 1 of the paper: mode, part of the tokens that is noise, mean span; how often, all alike in the paper.
PAPER = (
    ("R", 0.15, 3.0, 1.0),
    ("R", 0.15, 8.0, 1.0),
    ("S", 0.25, 0.0, 1.0),
    ("X", 0.5, 3.0, 1.0),
    ("X", 0.5, 8.0, 1.0),
    ("X", 0.15, 64.0, 1.0),
    ("X", 0.5, 64.0, 1.0),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ul2Config:
    """Seven denoisers, one for each row, drawn by their weights."""

    name: Literal["ul2"] = setting("ul2", "which objective this is")
    denoisers: tuple[tuple[str, float, float, float], ...] = setting(
        PAPER, "(mode R, S or X; noise density; mean span, 0: one span, a document's end; weight of the draw) of each"
    )
    mode_ids: dict[str, int] = setting({}, "id of each mode's token: {'R': 5, 'S': 6, 'X': 7}; text never has them")
    layout: Layout = setting("encoder_decoder", LAYOUT_HELP)
    multiple_of: int = setting(1, "rows are filled up to multiples of this, with padding")
    first_sentinel_id: int | None = setting(None, "id of the first sentinel; none: the tokenizer's sentinels")
    num_sentinels: int = setting(
        100,
        "with first_sentinel_id: how many there are, one for each span of a document",
        read_if="data.objective.first_sentinel_id!=none",
    )
    sentinel_step: Literal[-1, 1] = setting(
        1, "from one sentinel's id to the next; T5's own go down", read_if="data.objective.first_sentinel_id!=none"
    )
    end_id: int | None = setting(None, "id that ends the targets of a document; none: the tokenizer's end")
    start_id: int | None = setting(
        None,
        "id that a decoder reads first; none: end_id. T5 has its padding, 0",
        read_if="data.objective.layout=encoder_decoder",
    )

    def __post_init__(self):
        check_rows(self.multiple_of, self.num_sentinels)
        if not self.denoisers:
            raise BadInput("denoisers is empty; leave it out for the paper's seven")
        for mode, noise_density, mean_span, weight in self.denoisers:
            check_denoiser(noise_density, mean_span or 1.0)
            if mode not in MODES:
                raise BadInput(f"denoisers has the mode {mode!r}; use R, S or X")
            if weight < 0:
                raise BadInput(f"denoisers has the weight {weight}, which must not be negative")
        if not sum(weight for *_, weight in self.denoisers):
            raise BadInput("the weights of denoisers are all 0; raise one")
