"""Reader and writer of PEFT's adapter_config.json (huggingface.co/docs/peft).

Raises BadInput for keys that change the result in PEFT and are not implemented here.
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
# Keys that do not affect inference. fan_in_fan_out is known from the model.
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
# Limits on untrusted regular expressions, which could otherwise backtrack for hours.
MOST_REPEATS, MOST_WAYS, LONGEST_PATTERN = 6, 100_000, 2000
# A repeated group. Also flags, comments and brackets in a set, which could hide a repeated group.
ENDLESS = re.compile(r"\)[*+?{]|\(\?[^:!=<P]|\[\^?\]|\[[^\]]*[()|\[]")


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """Contents of an adapter_config.json."""

    rank: int
    alpha: float
    rslora: bool  # True for a scale of alpha / sqrt(rank) instead of alpha / rank
    targets: str | tuple[str, ...]
    exclude: str | tuple[str, ...]
    ranks: Mapping[str, int]  # {module name pattern: rank} for modules whose rank is not `rank`
    alphas: Mapping[str, float]  # {module name pattern: alpha} for modules whose alpha is not `alpha`
    base: str | None  # base_model_name_or_path

    def rank_of(self, module: str) -> int:
        """Returns the LoRA rank of a module."""
        return first_match(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of B A for a module."""
        rank = self.rank_of(module)
        return first_match(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def has(self, module: str) -> bool:
        """Returns True if a linear module has an adapter. The target all-linear excludes lm_head."""
        if matches_module(self.exclude, module):
            return False
        if isinstance(self.targets, str) and self.targets.lower() == ALL_LINEAR:
            return module.rpartition(".")[2] != "lm_head"
        return matches_module(self.targets, module)


def read(values: Mapping[str, Any]) -> AdapterConfig:
    """Parses the JSON object in adapter_config.json. Raises BadInput for invalid or unsupported values."""
    for key, allowed in ALLOWED.items():
        if key in values and values[key] not in allowed:
            known = " or ".join(repr(value) for value in allowed)
            raise BadInput(f"{FILE}: {key}={short(values[key])} is not supported; supported: {known}")
    for key, value in values.items():
        if key not in READ | WITHOUT_EFFECT and value not in (None, False, "", [], {}, ()):
            raise BadInput(f"{FILE}: {key}={short(value)} is not supported; merge the adapter with PEFT")
    rank, alpha = values.get("r", 8), values.get("lora_alpha", 8)
    ranks, alphas = values.get("rank_pattern") or {}, values.get("alpha_pattern") or {}
    for key, table in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if not isinstance(table, dict):
            raise BadInput(f"{FILE}: {key} must map patterns to numbers; download the file again")
    for value in (rank, *ranks.values()):
        if type(value) is not int or value < 1:
            raise BadInput(f"{FILE}: rank {short(value)} must be a positive integer")
    for value in (alpha, *alphas.values()):
        if type(value) not in (int, float) or not abs(value) <= LARGEST:  # also rejects NaN
            raise BadInput(f"{FILE}: alpha {short(value)} must be a number whose magnitude is at most {LARGEST:.2e}")
    base, targets = values.get("base_model_name_or_path"), modules(values, "target_modules")
    base = base if isinstance(base, str) and base else None
    exclude, rslora = modules(values, "exclude_modules"), values.get("use_rslora") is True
    for pattern in (*ranks, *alphas, *(one for one in (targets, exclude) if isinstance(one, str))):
        check_pattern(pattern)
    return AdapterConfig(rank, float(alpha), rslora, targets, exclude, ranks, alphas, base)


def modules(values: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    """Returns the pattern or the module names in values[key], or () if the key is absent."""
    value = values.get(key)
    if value is None or isinstance(value, str):
        return value or ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise BadInput(f"{FILE}: {key} must be a pattern or a list of names; download the file again")
    return tuple(value)


def check_pattern(pattern: str) -> None:
    """Raises BadInput for a regular expression that is invalid or may backtrack without bound."""
    bare = re.sub(r"\\.", "a", pattern, flags=re.DOTALL).replace("(?:", "(")  # escaped characters are literals
    repeats = len(re.findall(r"[*+?{]\??", bare))  # .*? counts as one
    is_long = len(pattern) > LONGEST_PATTERN or repeats > MOST_REPEATS
    if is_long or ENDLESS.search(bare) or count_alternatives(bare) > MOST_WAYS:
        raise BadInput(
            f"{FILE}: the pattern {pattern[:80]!r} can take very long to match; list the module names instead"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise BadInput(f"{FILE}: {pattern[:80]!r} is not a valid regular expression: {error}") from None


def count_alternatives(bare: str) -> int:
    """Returns an upper bound on the number of combinations of alternatives. bare: pattern without escapes."""
    total, choices = 1, [1]
    for character in bare:
        if character == "(":
            choices.append(1)
        elif character == "|":
            choices[-1] += 1
        elif character == ")" and len(choices) > 1:
            total *= choices.pop()
    return total


def matches_module(names: str | Sequence[str], module: str) -> bool:
    """Returns True if the pattern matches the full module name, or if the module name ends with one of the names."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def first_match(table: Mapping[str, Any], module: str, usual: Any) -> Any:
    """Returns the value of the first pattern that matches the end of a module name, or `usual` if none matches."""
    return next((value for key, value in table.items() if re.match(rf"(.*\.)?({key})$", module)), usual)


def write(
    rank: int, alpha: float, names: Sequence[str], base: str | None, joint: Mapping[str, int], transposed: bool
) -> dict[str, Any]:
    """Returns the JSON object of the file. joint: {module: leaves per matrix}. transposed: matrices are [out, in]."""
    several = {name: count for name, count in joint.items() if count > 1}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted(names), "fan_in_fan_out": not transposed, "use_rslora": False, "use_dora": False,
        "rank_pattern": {name: rank * count for name, count in several.items()},
        "alpha_pattern": {name: alpha * count for name, count in several.items()},
        "modules_to_save": None, "layers_to_transform": None, "init_lora_weights": True,
    }  # fmt: skip
