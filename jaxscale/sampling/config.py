"""Settings of the text that a training run writes."""

import dataclasses

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
        if self.num_tokens < 0 or self.top_k < 0 or self.temperature <= 0:
            raise BadInput("num_tokens and top_k must be at least 0, temperature above 0")
        if self.every_steps < 0 or self.every_steps and not self.num_tokens:
            raise BadInput(f"every_steps={self.every_steps} must be at least 0, and is for num_tokens above 0")
        if not self.prompt:
            raise BadInput("prompt must not be empty: the first token needs one before it")
