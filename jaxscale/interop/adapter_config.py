"""PEFT's adapter_config.json (huggingface.co/docs/peft): target modules, rank and scale.

What PEFT would compute by it and we do not is refused by name.
"""

import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short

FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
# Says nothing about what a trained adapter computes; dropout is of its training, fan_in_fan_out follows from the model.
WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config",
}  # fmt: skip
READ = {
    "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern",
    "target_modules", "task_type", "use_rslora",
}  # fmt: skip
ALLOWED = dict(
    peft_type=("LORA",), task_type=(None, "CAUSAL_LM"), bias=("none",), init_lora_weights=(True, False, "gaussian")
)
LARGEST = sys.float_info.max
# Of a regular expression that somebody else wrote: more could run for hours.
MOST_REPEATS, MOST_WAYS, LONGEST_PATTERN = 6, 100_000, 2000
# A group that is repeated; flags and comments, and brackets in a set, behind which one could hide.
ENDLESS = re.compile(r"\)[*+?{]|\(\?[^:!=<P]|\[\^?\]|\[[^\]]*[()|\[]")


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """Contents of an adapter_config.json."""

    rank: int
    alpha: float
    rslora: bool  # the scale is alpha / sqrt(rank), not alpha / rank
    targets: str | tuple[str, ...]
    exclude: str | tuple[str, ...]
    ranks: Mapping[str, int]  # pattern of a module's name: its rank, where it has one of its own
    alphas: Mapping[str, float]
    base: str | None  # the model it was trained with

    def rank_of(self, module: str) -> int:
        """Columns of A^T and B."""
        return by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of B A."""
        rank = self.rank_of(module)
        return by_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def has(self, module: str) -> bool:
        """Returns True if a matrix of the model, other than the one that predicts tokens, has an adapter."""
        if is_among(self.exclude, module):
            return False
        if isinstance(self.targets, str) and self.targets.lower() == ALL_LINEAR:
            return module.rpartition(".")[2] != "lm_head"
        return is_among(self.targets, module)


def read(values: Mapping[str, Any]) -> AdapterConfig:
    """The file's object. Raises BadInput for what it should not hold, and for what we do not compute."""
    for key, allowed in ALLOWED.items():
        if key in values and values[key] not in allowed:
            known = " or ".join(repr(value) for value in allowed)
            raise BadInput(f"{FILE}: {key}={short(values[key])} is not supported; it may be {known}")
    for key, value in values.items():
        if key not in READ | WITHOUT_EFFECT and value not in (None, False, "", [], {}, ()):
            raise BadInput(f"{FILE}: {key}={short(value)} is not supported; merge it with PEFT's merge_and_unload")
    rank, alpha = values.get("r", 8), values.get("lora_alpha", 8)
    ranks, alphas = values.get("rank_pattern") or {}, values.get("alpha_pattern") or {}
    for key, table in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if not isinstance(table, dict):
            raise BadInput(f"{FILE}: {key} is no table of patterns; fetch it again")
    for value in (rank, *ranks.values()):
        if type(value) is not int or value < 1:
            raise BadInput(f"{FILE}: a rank is {short(value)}, and must be a whole number from 1 on")
    for value in (alpha, *alphas.values()):
        if type(value) not in (int, float) or not abs(value) <= LARGEST:  # NaN is not, either
            raise BadInput(f"{FILE}: an alpha is {short(value)}, and must be a number of at most {LARGEST:.2e}")
    base = values.get("base_model_name_or_path")
    found = AdapterConfig(
        rank=rank,
        alpha=float(alpha),
        rslora=values.get("use_rslora") is True,
        targets=modules(values, "target_modules"),
        exclude=modules(values, "exclude_modules"),
        ranks=ranks,
        alphas=alphas,
        base=base if isinstance(base, str) and base else None,
    )
    for pattern in (*ranks, *alphas, *(one for one in (found.targets, found.exclude) if isinstance(one, str))):
        check_pattern(pattern)
    return found


def modules(values: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    """A pattern, or names; () where nothing is said."""
    value = values.get(key)
    if value is None or isinstance(value, str):
        return value or ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise BadInput(f"{FILE}: {key} is neither a pattern nor a list of names; fetch it again")
    return tuple(value)


def check_pattern(pattern: str) -> None:
    """Raises BadInput for what is no regular expression, or one that may run without end."""
    bare = re.sub(r"\\.", "a", pattern, flags=re.DOTALL).replace("(?:", "(")  # what is escaped repeats nothing
    repeats = len(re.findall(r"[*+?{]\??", bare))  # .*? is one
    if len(pattern) > LONGEST_PATTERN or repeats > MOST_REPEATS or ENDLESS.search(bare) or ways(bare) > MOST_WAYS:
        raise BadInput(
            f"{FILE}: the pattern {pattern[:80]!r} may take without end to match; name the modules in a list"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise BadInput(f"{FILE}: {pattern[:80]!r} is no regular expression: {error}") from None


def ways(bare: str) -> int:
    """In how many ways the alternatives of a pattern's groups can be chosen, at most. bare: without what is escaped."""
    total, choices = 1, [1]
    for character in bare:
        if character == "(":
            choices.append(1)
        elif character == "|":
            choices[-1] += 1
        elif character == ")" and len(choices) > 1:
            total *= choices.pop()
    return total


def is_among(names: str | Sequence[str], module: str) -> bool:
    """Returns True if a pattern matches the whole name of a module, or one of several names is its end."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def by_pattern(table: Mapping[str, Any], module: str, usual: Any) -> Any:
    """The value of the first pattern that the name of a module ends with."""
    return next((value for key, value in table.items() if re.match(rf"(.*\.)?({key})$", module)), usual)


def write(
    rank: int, alpha: float, names: Sequence[str], base: str | None, joint: Mapping[str, int], turned: bool
) -> dict[str, Any]:
    """The file's object for adapters on all matrices of these names.

    Args: joint: {name: how many of ours it is}, which has as many times the rank and the same scale. turned: whether
    the model keeps its matrices as [out, in].
    """
    several = {name: count for name, count in joint.items() if count > 1}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted(names), "fan_in_fan_out": not turned, "use_rslora": False, "use_dora": False,
        "rank_pattern": {name: rank * count for name, count in several.items()},
        "alpha_pattern": {name: alpha * count for name, count in several.items()},
        "modules_to_save": None, "layers_to_transform": None, "init_lora_weights": True,
    }  # fmt: skip
