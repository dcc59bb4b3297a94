"""Settings of training objectives, and the lengths of their sequences."""

import dataclasses
from typing import Literal, NamedTuple

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextTokenConfig:
    """Settings of next-token prediction within each document."""

    name: Literal["next_token"] = setting("next_token", "selects this objective")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixLmConfig:
    """Settings of prefix LM: bidirectional attention in a prefix of each document, and loss on the rest."""

    name: Literal["prefix_lm"] = setting("prefix_lm", "selects this objective")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLmConfig:
    """Settings of masked language modelling (BERT). By default 15% of the tokens are targets.

    Of the targets, 80% are masked, 10% are replaced by random tokens, and 10% are unchanged.
    """

    name: Literal["masked_lm"] = setting("masked_lm", "selects this objective")
    rate: float = setting(0.15, "fraction of a sequence's ordinary tokens that are targets")
    mask_part: float = setting(0.8, "fraction of the targets that are replaced by the mask token")
    random_part: float = setting(0.1, "fraction of the targets that are replaced by a random ordinary token")
    mask_id: int | None = setting(None, "id of the mask token; none: the tokenizer's mask token")

    def __post_init__(self):
        if not 0 < self.rate < 1:
            raise BadInput(f"rate={self.rate} must be between 0 and 1")
        if self.mask_part < 0 or self.random_part < 0 or self.mask_part + self.random_part > 1:
            raise BadInput(
                f"mask_part={self.mask_part} and random_part={self.random_part} must be at least 0, "
                "and their sum at most 1"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenoisingConfig:
    """Settings of all objectives that remove spans from sequences."""

    layout: Literal["encoder_decoder", "one_row"] = setting(
        "encoder_decoder",
        "encoder_decoder: inputs for an encoder and targets for a decoder; one_row: for decoder-only models, each "
        "document's inputs as a prefix, followed by its targets",
    )
    multiple_of: int = setting(1, "sequences are padded to multiples of this length")
    first_sentinel_id: int | None = setting(None, "id of the first sentinel; none: the tokenizer's sentinels")
    num_sentinels: int = setting(
        100,
        "with first_sentinel_id: number of sentinels; a document uses one sentinel per span",
        read_if="data.objective.first_sentinel_id!=none",
    )
    sentinel_step: Literal[-1, 1] = setting(
        1, "difference of consecutive sentinel ids; -1 for T5", read_if="data.objective.first_sentinel_id!=none"
    )
    end_id: int | None = setting(None, "id that ends the inputs and targets of a document; none: tokenizer's end id")
    start_id: int | None = setting(
        None,
        "first input id of the decoder; none: end_id. T5 uses its padding id, 0",
        read_if="data.objective.layout=encoder_decoder",
    )

    def __post_init__(self):
        for name in ("multiple_of", "num_sentinels"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanCorruptionConfig(DenoisingConfig):
    """Settings of T5 span corruption, which by default removes 15% of the tokens in spans of 3 tokens on average."""

    name: Literal["span_corruption"] = setting("span_corruption", "selects this objective")
    noise_density: float = setting(0.15, "fraction of a sequence's tokens that are removed from the inputs")
    mean_span: float = setting(3.0, "mean length of a span, in tokens")

    def __post_init__(self):
        check_denoiser(self.noise_density, self.mean_span)
        super().__post_init__()


def check_denoiser(noise_density: float, mean_span: float) -> None:
    """Raises BadInput for an invalid noise density or mean span."""
    if not 0 < noise_density < 1:
        raise BadInput(f"noise_density={noise_density} must be between 0 and 1")
    if mean_span < 1:
        raise BadInput(f"mean_span={mean_span} must be at least 1 token")


class NoiseAmount(NamedTuple):
    """Numbers of noise tokens and of spans in a sequence that contains a single document."""

    noise: int
    spans: int


def noise_amount(length: int, noise_density: float, mean_span: float | None) -> NoiseAmount:
    """Returns the amount of noise for `length` tokens, rounded as in T5. mean_span: None for a single span."""
    if length < 2:
        return NoiseAmount(0, 0)
    noise = min(max(round(length * noise_density), 1), length - 1)
    spans = 1 if mean_span is None else max(1, round(noise / mean_span))
    return NoiseAmount(noise, min(spans, noise, length - noise))


def corrupted_lengths(length: int, cut: NoiseAmount) -> tuple[int, int]:
    """Returns (length of the inputs, length of the targets), including sentinels and end tokens."""
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
    """Settings of UL2 (arXiv:2205.05131, section 3.1), which samples one denoiser per sequence, according to weights.

    The modes are R (short spans), S (one span at the end) and X (long spans or much noise). The inputs of each document
    begin with the mode token and have no end token.
    """

    name: Literal["ul2"] = setting("ul2", "selects this objective")
    denoisers: tuple[tuple[str, float, float, float], ...] = setting(
        UL2_DENOISERS,
        "tuples (mode R, S or X; noise density; mean span in tokens; sampling weight); a mean span of 0 is a single "
        "span at the end of the document",
    )
    mode_ids: dict[str, int] = setting({}, "id of each mode's token, which text must not use: {'R': 5, 'S': 6, 'X': 7}")
    end_id: int | None = setting(None, "id that ends the targets of a document; none: tokenizer's end id")

    def __post_init__(self):
        super().__post_init__()
        if not self.denoisers:
            raise BadInput("denoisers is empty; add a denoiser, or remove the setting to use the paper's denoisers")
        for mode, noise_density, mean_span, weight in self.denoisers:
            check_denoiser(noise_density, mean_span or 1.0)
            if mode not in ("R", "S", "X"):
                raise BadInput(f"denoisers has an unknown mode {mode!r}; use R, S or X")
            if weight < 0:
                raise BadInput(f"denoisers has the weight {weight}; weights must be at least 0")
        if not sum(weight for *_, weight in self.denoisers):
            raise BadInput("the weights of denoisers are all 0; set a weight above 0")


@dataclasses.dataclass(frozen=True)
class Denoiser:
    """A distribution of noise spans in a sequence."""

    noise_density: float
    mean_span: float | None  # None: a single span
    weight: float = 1.0
    mode: str = ""  # mode of UL2, whose token begins the inputs; '' for none


def denoisers(cfg: DenoisingConfig) -> tuple[Denoiser, ...]:
    """Returns the denoisers of the objective. One denoiser is sampled for each sequence."""
    if isinstance(cfg, SpanCorruptionConfig):
        return (Denoiser(cfg.noise_density, cfg.mean_span),)
    assert isinstance(cfg, Ul2Config), "there are two denoising objectives"
    return tuple(Denoiser(density, mean or None, weight, mode) for mode, density, mean, weight in cfg.denoisers)


class RowLengths(NamedTuple):
    """Lengths of a model's input sequences."""

    row: int  # length of decoder sequences
    encoder: int | None = None  # length of encoder sequences; None without an encoder
    prefix: bool = False  # True if sequences have a bidirectional prefix


def denoised_lengths(cfg: DenoisingConfig, seq_len: int) -> RowLengths:
    """Returns the smallest lengths that fit a sequence of seq_len tokens after corruption by any of the denoisers."""
    round_up = lambda length: -(-length // cfg.multiple_of) * cfg.multiple_of
    pairs = [corrupted_lengths(seq_len, noise_amount(seq_len, d.noise_density, d.mean_span)) for d in denoisers(cfg)]
    if cfg.layout == "one_row":
        return RowLengths(round_up(max(map(sum, pairs))), prefix=True)
    return RowLengths(round_up(max(targets for _, targets in pairs)), round_up(max(inputs for inputs, _ in pairs)))


ObjectiveConfig = NextTokenConfig | PrefixLmConfig | MaskedLmConfig | SpanCorruptionConfig | Ul2Config


def row_lengths(cfg: ObjectiveConfig, seq_len: int) -> RowLengths:
    """Returns the lengths of the sequences that the objective makes from packed sequences of seq_len tokens."""
    if isinstance(cfg, DenoisingConfig):
        return denoised_lengths(cfg, seq_len)
    return RowLengths(seq_len, prefix=isinstance(cfg, PrefixLmConfig))
