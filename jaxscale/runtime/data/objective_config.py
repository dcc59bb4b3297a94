"""Settings of training objectives, and the lengths of the rows that they make from packed rows."""

import dataclasses
from typing import Literal, NamedTuple

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextTokenConfig:
    """Next-token prediction within each document."""

    name: Literal["next_token"] = setting("next_token", "selects this objective")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixLmConfig:
    """Prefix LM: bidirectional attention over a prefix of each document, loss on the rest."""

    name: Literal["prefix_lm"] = setting("prefix_lm", "selects this objective")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLmConfig:
    """BERT: 15% of the tokens are targets; of these 80% are masked, 10% replaced, and 10% unchanged."""

    name: Literal["masked_lm"] = setting("masked_lm", "selects this objective")
    rate: float = setting(0.15, "fraction of a row's ordinary tokens that are targets")
    mask_part: float = setting(0.8, "fraction of the targets that are replaced by the mask")
    random_part: float = setting(0.1, "fraction of the targets that are replaced by a random ordinary token")
    mask_id: int | None = setting(None, "id of the mask; none: the tokenizer's")

    def __post_init__(self):
        if not 0 < self.rate < 1:
            raise BadInput(f"rate={self.rate} must be between 0 and 1")
        if self.mask_part < 0 or self.random_part < 0 or self.mask_part + self.random_part > 1:
            raise BadInput(
                f"mask_part={self.mask_part} and random_part={self.random_part} must not be negative, "
                "and together at most 1"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenoisingConfig:
    """Settings of all objectives that cut spans out of rows."""

    layout: Literal["encoder_decoder", "one_row"] = setting(
        "encoder_decoder",
        "encoder_decoder: inputs to the encoder, targets to the decoder; one_row: for a decoder, each document's "
        "inputs as a prefix, followed by its targets",
    )
    multiple_of: int = setting(1, "rows are padded to multiples of this")
    first_sentinel_id: int | None = setting(None, "id of the first sentinel; none: the tokenizer's sentinels")
    num_sentinels: int = setting(
        100,
        "with first_sentinel_id: number of sentinels; a document uses one for each span",
        read_if="data.objective.first_sentinel_id!=none",
    )
    sentinel_step: Literal[-1, 1] = setting(
        1, "difference of consecutive sentinel ids; -1 for T5", read_if="data.objective.first_sentinel_id!=none"
    )
    end_id: int | None = setting(None, "id that ends the inputs and targets of a document; none: the tokenizer's end")
    start_id: int | None = setting(
        None,
        "first input id of a decoder; none: end_id. T5 uses its padding id, 0",
        read_if="data.objective.layout=encoder_decoder",
    )

    def __post_init__(self):
        for name in ("multiple_of", "num_sentinels"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanCorruptionConfig(DenoisingConfig):
    """T5 span corruption: 15% of the tokens, in spans of 3 on average."""

    name: Literal["span_corruption"] = setting("span_corruption", "selects this objective")
    noise_density: float = setting(0.15, "fraction of a row's tokens that is removed from the inputs")
    mean_span: float = setting(3.0, "mean length of a span [tokens]")

    def __post_init__(self):
        check_denoiser(self.noise_density, self.mean_span)
        super().__post_init__()


def check_denoiser(noise_density: float, mean_span: float) -> None:
    """Raises BadInput for an invalid density or span."""
    if not 0 < noise_density < 1:
        raise BadInput(f"noise_density={noise_density} must be between 0 and 1")
    if mean_span < 1:
        raise BadInput(f"mean_span={mean_span} must be at least 1 token")


class NoiseAmount(NamedTuple):
    """Noise tokens and spans of a row of one document."""

    noise: int  # tokens
    spans: int


def noise_amount(length: int, noise_density: float, mean_span: float | None) -> NoiseAmount:
    """Returns the noise of a row of `length` tokens, rounded as in T5. mean_span: None for one span."""
    if length < 2:
        return NoiseAmount(0, 0)
    noise = min(max(round(length * noise_density), 1), length - 1)
    spans = 1 if mean_span is None else max(1, round(noise / mean_span))
    return NoiseAmount(noise, min(spans, noise, length - noise))


def corrupted_lengths(length: int, cut: NoiseAmount) -> tuple[int, int]:
    """Returns (tokens of the inputs, tokens of the targets), including sentinels and end tokens."""
    return length - cut.noise + cut.spans + 1, cut.noise + cut.spans + 1


# Table 1 of arXiv:2205.05131: mode, noise density, mean span, weight (uniform).
UL2_DENOISERS = (
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
    """UL2 (arXiv:2205.05131, 3.1): short spans (R), suffix (S) or extreme (X), one denoiser per row drawn by weight.

    Each document of the row begins with the token of the mode, which replaces the end token of the inputs.
    """

    name: Literal["ul2"] = setting("ul2", "selects this objective")
    denoisers: tuple[tuple[str, float, float, float], ...] = setting(
        UL2_DENOISERS,
        "a tuple (mode R, S or X; noise density; mean span, 0: one span at the end of the document; sampling weight) "
        "each",
    )
    mode_ids: dict[str, int] = setting({}, "id of each mode's token: {'R': 5, 'S': 6, 'X': 7}; not used by text")
    end_id: int | None = setting(None, "id that ends the targets of a document; none: the tokenizer's end")

    def __post_init__(self):
        super().__post_init__()
        if not self.denoisers:
            raise BadInput("denoisers is empty; remove it for the seven of the paper")
        for mode, noise_density, mean_span, weight in self.denoisers:
            check_denoiser(noise_density, mean_span or 1.0)
            if mode not in ("R", "S", "X"):
                raise BadInput(f"denoisers has the mode {mode!r}; use R, S or X")
            if weight < 0:
                raise BadInput(f"denoisers has the weight {weight}, which must not be negative")
        if not sum(weight for *_, weight in self.denoisers):
            raise BadInput("the weights of denoisers are all 0; raise one")


@dataclasses.dataclass(frozen=True)
class Denoiser:
    """A noise distribution over spans of a row."""

    noise_density: float
    mean_span: float | None  # None: one span
    weight: float = 1.0
    mode: str = ""  # its token begins the inputs, which then have no end token


def denoisers(cfg: DenoisingConfig) -> tuple[Denoiser, ...]:
    """Returns the denoisers of the objective, one of which is drawn for each row."""
    if isinstance(cfg, SpanCorruptionConfig):
        return (Denoiser(cfg.noise_density, cfg.mean_span),)
    assert isinstance(cfg, Ul2Config), "there are two denoising objectives"
    return tuple(Denoiser(density, mean or None, weight, mode) for mode, density, mean, weight in cfg.denoisers)


class RowLengths(NamedTuple):
    """Lengths of the rows that a model reads."""

    row: int  # of the decoder or the single row
    encoder: int | None = None
    prefix: bool = False  # rows have a prefix


def denoised_lengths(cfg: DenoisingConfig, seq_len: int) -> RowLengths:
    """Returns the smallest lengths that fit a row of seq_len tokens after any of the denoisers."""
    round_up = lambda length: -(-length // cfg.multiple_of) * cfg.multiple_of
    pairs = [corrupted_lengths(seq_len, noise_amount(seq_len, d.noise_density, d.mean_span)) for d in denoisers(cfg)]
    if cfg.layout == "one_row":
        return RowLengths(round_up(max(map(sum, pairs))), prefix=True)
    return RowLengths(round_up(max(targets for _, targets in pairs)), round_up(max(inputs for inputs, _ in pairs)))


ObjectiveConfig = NextTokenConfig | PrefixLmConfig | MaskedLmConfig | SpanCorruptionConfig | Ul2Config


def row_lengths(cfg: ObjectiveConfig, seq_len: int) -> RowLengths:
    """Returns the lengths of the rows that the objective makes from packed rows of seq_len tokens."""
    if isinstance(cfg, DenoisingConfig):
        return denoised_lengths(cfg, seq_len)
    return RowLengths(seq_len, prefix=isinstance(cfg, PrefixLmConfig))
