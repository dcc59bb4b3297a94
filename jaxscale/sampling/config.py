"""Settings of the text that a training run writes."""

import dataclasses
import math

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What the model writes at the end of a run, and on the way."""

    num_tokens: int = setting(
        0,
        "tokens to sample at the end of the run; 0: none",
        may_change=True,
        read_if="model.name=llama|gpt2 and data.name!=synthetic",
    )
    every_steps: int = setting(
        0, "steps between samples on the way, which go to samples.jsonl; 0: only at the end", may_change=True
    )
    ema: bool = setting(False, "true: with the average that train.ema keeps", may_change=True)
    prompt: str = setting("\n", "text to go on from", may_change=True)
    temperature: float = setting(0.8, "1: as the model says; towards 0: always the likeliest", may_change=True)
    top_k: int = setting(40, "sample among the k likeliest tokens; 0: among all", may_change=True)

    def __post_init__(self):
        for name in ("num_tokens", "top_k"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 0")
        if self.temperature <= 0:
            raise BadInput(f"temperature={self.temperature} must be above 0")
        if self.every_steps < 0 or self.every_steps and not self.num_tokens:
            raise BadInput(f"every_steps={self.every_steps} must be at least 0, and is for num_tokens above 0")
        if not self.prompt:
            raise BadInput("prompt must not be empty: the first token needs one before it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. What is listed first is done first; a token as likely as the last one kept is kept too."""

    repetition_penalty: float = setting(
        1.0, "above 1: tokens of the text so far become less likely (arXiv:1909.05858); 1: as the model says"
    )
    temperature: float = setting(0.8, "1: as the model says; 0: always the likeliest")
    top_k: int = setting(0, "draw among the k likeliest tokens; 0: among all")
    top_p: float = setting(
        1.0, "draw among the likeliest tokens that together have this probability (arXiv:1904.09751); 1: among all"
    )
    min_p: float = setting(
        0.0, "draw among tokens that have this part of the likeliest one's probability (arXiv:2407.01082); 0: all"
    )

    def __post_init__(self):
        for name, holds, rule in (
            ("repetition_penalty", self.repetition_penalty > 0, "above 0 (1: no penalty)"),
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "0 or more and below 1"),
        ):
            value = getattr(self, name)
            if not holds or not math.isfinite(value):
                raise BadInput(f"{name}={value} must be {rule}")

    @property
    def looks_back(self) -> bool:
        """Whether it matters which tokens the text has."""
        return self.repetition_penalty != 1.0


GREEDY = Sampling(temperature=0.0)
