"""Settings of text sampling."""

import dataclasses
import math

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Settings of the samples during a run and at its end."""

    num_tokens: int = setting(
        0,
        "tokens to sample at the end of the run; 0: none",
        may_change=True,
        read_if="model.name=llama|gpt2 and data.name!=synthetic",
    )
    every_steps: int = setting(
        0, "steps between samples during the run, written to samples.jsonl; 0: only at the end", may_change=True
    )
    ema: bool = setting(False, "true: sample with the moving average of train.ema", may_change=True)
    prompt: str = setting("\n", "text to continue", may_change=True)
    temperature: float = setting(
        0.8, "1: the model's probabilities; near 0: almost always the most likely token", may_change=True
    )
    top_k: int = setting(40, "sample from the k most likely tokens; 0: from all", may_change=True)

    def __post_init__(self):
        for name in ("num_tokens", "top_k"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 0")
        if self.temperature <= 0:
            raise BadInput(f"temperature={self.temperature} must be above 0")
        if self.every_steps < 0 or self.every_steps and not self.num_tokens:
            raise BadInput(f"every_steps={self.every_steps} must be at least 0, and 0 if num_tokens is 0")
        if not self.prompt:
            raise BadInput("prompt must not be empty: the model needs at least one token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters, applied in this order. Filters also keep tokens that tie with the last one they keep."""

    repetition_penalty: float = setting(
        1.0, "above 1: makes tokens that are already in the text less likely (arXiv:1909.05858); 1: no penalty"
    )
    temperature: float = setting(0.8, "1: the model's probabilities; 0: always the most likely token")
    top_k: int = setting(0, "sample from the k most likely tokens; 0: from all")
    top_p: float = setting(
        1.0, "sample from the most likely tokens with this total probability (arXiv:1904.09751); 1: from all"
    )
    min_p: float = setting(
        0.0, "sample from tokens with at least this fraction of the highest probability (arXiv:2407.01082); 0: from all"
    )

    def __post_init__(self):
        for name, holds, rule in (
            ("repetition_penalty", self.repetition_penalty > 0, "above 0 (1: no penalty)"),
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "0 or more and below 1"),
        ):
            if not holds or not math.isfinite(getattr(self, name)):
                raise BadInput(f"{name}={getattr(self, name)} must be {rule}")

    @property
    def depends_on_text(self) -> bool:
        """True if the settings need the set of tokens in the text so far."""
        return self.repetition_penalty != 1.0


GREEDY = Sampling(temperature=0.0)
