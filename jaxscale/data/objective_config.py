"""What a model is asked to predict, and how long the rows are that an objective makes of packed rows."""

import dataclasses
from typing import Literal, NamedTuple

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextTokenConfig:
    """Every token of a document from those before it."""

    name: Literal["next_token"] = setting("next_token", "which objective this is")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixLmConfig:
    """Each document's first part is seen by all of it, and only what follows is learned from."""

    name: Literal["prefix_lm"] = setting("prefix_lm", "which objective this is")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLmConfig:
    """BERT's: 15% of the tokens are targets; of these 80% become the mask, 10% another token, and 10% stay."""

    name: Literal["masked_lm"] = setting("masked_lm", "which objective this is")
    rate: float = setting(0.15, "part of a row's ordinary tokens that are targets")
    mask_part: float = setting(0.8, "part of the targets that the mask stands in for")
    random_part: float = setting(0.1, "part of the targets that an ordinary token drawn at random stands in for")
    mask_id: int | None = setting(None, "id of the mask; none: the tokenizer's")

    def __post_init__(self):
        if not 0 < self.rate < 1:
            raise BadInput(f"rate={self.rate} must lie between 0 and 1")
        if self.mask_part < 0 or self.random_part < 0 or self.mask_part + self.random_part > 1:
            raise BadInput(
                f"mask_part={self.mask_part} and random_part={self.random_part} must not be negative, "
                "and together at most 1"
            )


Layout = Literal["encoder_decoder", "one_row"]


LAYOUT_HELP = (
    "encoder_decoder: inputs to the encoder, targets to the decoder; one_row: for a decoder alone, each document's "
    "inputs as a prefix and its targets behind it"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenoisingConfig:
    """What all objectives have that cut spans out of rows."""

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
    end_id: int | None = setting(None, "id that ends the inputs and targets of a document; none: the tokenizer's end")
    start_id: int | None = setting(
        None,
        "id that a decoder reads first; none: end_id. T5 has its padding, 0",
        read_if="data.objective.layout=encoder_decoder",
    )

    def __post_init__(self):
        for name in ("multiple_of", "num_sentinels"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanCorruptionConfig(DenoisingConfig):
    """T5's: 15% of the tokens in spans of 3 on average."""

    name: Literal["span_corruption"] = setting("span_corruption", "which objective this is")
    noise_density: float = setting(0.15, "part of a row's tokens that is cut out")
    mean_span: float = setting(3.0, "mean length of a span [tokens]")

    def __post_init__(self):
        check_denoiser(self.noise_density, self.mean_span)
        super().__post_init__()


def check_denoiser(noise_density: float, mean_span: float) -> None:
    """Raises BadInput for a density or a span that no row can have."""
    if not 0 < noise_density < 1:
        raise BadInput(f"noise_density={noise_density} must lie between 0 and 1")
    if mean_span < 1:
        raise BadInput(f"mean_span={mean_span} must be at least 1 token")


class Amount(NamedTuple):
    """What is cut out of a row, if it is one document."""

    noise: int  # tokens
    spans: int


def amount(length: int, noise_density: float, mean_span: float | None) -> Amount:
    """The noise of a row of `length` tokens, rounded as T5 does. mean_span: None for one span."""
    if length < 2:
        return Amount(0, 0)
    noise = min(max(round(length * noise_density), 1), length - 1)
    spans = 1 if mean_span is None else max(1, round(noise / mean_span))
    return Amount(noise, min(spans, noise, length - noise))


def corrupted_lengths(length: int, cut: Amount) -> tuple[int, int]:
    """(tokens of the inputs, tokens of the targets): a sentinel for each span, and an end of each."""
    return length - cut.noise + cut.spans + 1, cut.noise + cut.spans + 1


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
class Ul2Config(DenoisingConfig):
    """Short spans (R), a text's end (S), or much of it (X): one denoiser a row, by weight (arXiv:2205.05131, 3.1).

    Each document of the row begins with the token of the mode, which takes the place of the mark at the end of inputs.
    """

    name: Literal["ul2"] = setting("ul2", "which objective this is")
    denoisers: tuple[tuple[str, float, float, float], ...] = setting(
        PAPER, "(mode R, S or X; noise density; mean span, 0: one span, a document's end; weight of the draw) of each"
    )
    mode_ids: dict[str, int] = setting({}, "id of each mode's token: {'R': 5, 'S': 6, 'X': 7}; text never has them")
    end_id: int | None = setting(None, "id that ends the targets of a document; none: the tokenizer's end")

    def __post_init__(self):
        super().__post_init__()
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


@dataclasses.dataclass(frozen=True)
class Denoiser:
    """One way to cut spans out of a row."""

    noise_density: float
    mean_span: float | None  # None: one span
    weight: float = 1.0
    mode: str = ""  # whose token begins the inputs, in place of a mark at their end


def denoisers(cfg: DenoisingConfig) -> tuple[Denoiser, ...]:
    """Returns the denoisers of the objective, one of which is drawn for each row."""
    if isinstance(cfg, SpanCorruptionConfig):
        return (Denoiser(cfg.noise_density, cfg.mean_span),)
    assert isinstance(cfg, Ul2Config), "there are two denoising objectives"
    return tuple(Denoiser(density, mean or None, weight, mode) for mode, density, mean, weight in cfg.denoisers)


class Lengths(NamedTuple):
    """Of the rows that a model reads."""

    row: int  # of the decoder, or of the only row
    encoder: int | None = None
    prefix: bool = False  # whether rows have one


def denoised_lengths(cfg: DenoisingConfig, seq_len: int) -> Lengths:
    """The least that hold what any of the denoisers makes of a row of seq_len tokens."""
    fill = lambda length: -(-length // cfg.multiple_of) * cfg.multiple_of
    pairs = [corrupted_lengths(seq_len, amount(seq_len, d.noise_density, d.mean_span)) for d in denoisers(cfg)]
    if cfg.layout == "one_row":
        return Lengths(fill(max(map(sum, pairs))), prefix=True)
    return Lengths(fill(max(targets for _, targets in pairs)), fill(max(inputs for inputs, _ in pairs)))


ObjectiveConfig = NextTokenConfig | PrefixLmConfig | MaskedLmConfig | SpanCorruptionConfig | Ul2Config


def row_lengths(cfg: ObjectiveConfig, seq_len: int) -> Lengths:
    """Of the rows that the objective makes of packed rows of seq_len tokens."""
    if isinstance(cfg, DenoisingConfig):
        return denoised_lengths(cfg, seq_len)
    return Lengths(seq_len, prefix=isinstance(cfg, PrefixLmConfig))
