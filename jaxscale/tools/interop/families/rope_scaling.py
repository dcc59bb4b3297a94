"""Reads and writes RoPE base and scaling of a config.json, in the formats of transformers 4 and 5."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.kernels.config import BY_LENGTH, RopeName, RopeScaling
from jaxscale.kernels.rope import dynamic_ntk_base, longrope_factors
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.tools.interop.families.settings import FULL, SLIDING, number
from jaxscale.units import or_list

MAX_POSITIONS, ORIGINAL_POSITIONS = "max_position_embeddings", "original_max_position_embeddings"
ROPE = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    ORIGINAL_POSITIONS,
)  # keys of RoPE


def same_names(*names: str) -> dict[str, str]:
    """Returns {name: name} for settings with equal keys."""
    return {name: name for name in names}


ORIGINAL_LENGTH = {ORIGINAL_POSITIONS: "original_max_len"}
SCALING_KEYS: dict[str, dict[str, str]] = dict(  # {scaling: {key: setting}}, without rope_type and factor
    linear={},
    dynamic={},
    llama3=same_names("low_freq_factor", "high_freq_factor") | ORIGINAL_LENGTH,
    yarn=same_names("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
    | ORIGINAL_LENGTH,
    longrope=same_names("short_factor", "long_factor", "attention_factor") | ORIGINAL_LENGTH,
)


def read_rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns (rope_base, rope_scaling) from rope_theta and rope_scaling (transformers 4) or rope_parameters (5).

    If both are present, rope_parameters is ignored, as in transformers 5. Raises BadInput for unsupported scalings.
    """
    scaling, parameters = hf.get("rope_scaling") or {}, hf.get("rope_parameters") or {}
    rope = {"rope_theta": hf["rope_theta"], **(scaling or parameters)}
    if nested := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise BadInput(
            f"config.json: rope_parameters of {nested[0]} alone are not supported for {hf.get('model_type')}"
        )
    found, unread = parse_rope(rope, hf), parameters.get("rope_theta", rope["rope_theta"])
    if scaling and "rope_theta" not in scaling and unread != rope["rope_theta"]:
        raise BadInput(
            f"config.json: rope_scaling overrides rope_parameters, whose rope_theta={short(unread)} transformers "
            f"then does not read: it takes {short(rope['rope_theta'])}; write one of the two, with rope_theta in it"
        )
    return found


def read_layer_type_rope(hf: Mapping[str, Any], layers: str) -> tuple[float, RopeScaling | None]:
    """read_rope for one layer type of Gemma 3. rope_scaling is merged into the rope_parameters of full_attention."""
    parameters = hf.get("rope_parameters") or {}
    if misplaced := [key for key in parameters if key not in (FULL, SLIDING)]:
        raise BadInput(
            f"config.json: rope_parameters has {misplaced[0]} next to the layer types, where transformers does not "
            f"read it for {hf.get('model_type')}; put it into {FULL} and {SLIDING}"
        )
    usual = {"rope_theta": hf["rope_theta" if layers == FULL else "rope_local_base_freq"]}
    added = (hf.get("rope_scaling") or {}) if layers == FULL else {}
    rope = {**usual, **(parameters.get(layers) or {"rope_type": "default"}), **added}
    rope.pop("truncate", None)  # transformers reads it next to the layer types, where it cannot be
    rope.setdefault(ORIGINAL_POSITIONS, hf.get(MAX_POSITIONS))  # nor does it read this one outside
    return parse_rope(rope, hf)


def parse_rope(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns (rope_base, rope_scaling) from RoPE's keys. Args: hf: the whole config.json."""
    base, name = number(rope, "rope_theta"), rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", name) != name:
        raise BadInput(
            f"config.json: RoPE has type={short(rope['type'])}, and transformers reads its rope_type={short(name)}; "
            "write rope_type alone"
        )
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor")) not in (None, 1.0):
        raise BadInput("config.json: partial_rotary_factor is not supported: RoPE rotates whole heads")
    if name == "default":
        return base, None
    if name not in READERS:
        known = or_list([repr(one) for one in ("default", *get_args(RopeName))])
        raise BadInput(f"config.json: RoPE scaling {short(name)} is not supported; it may be {known}")
    return base, RopeScaling(name=name, **READERS[name](rope, hf))


def read_linear(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of linear scaling."""
    return dict(factor=number(rope, "factor"))


def read_llama3(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of Llama 3 scaling."""
    return dict(
        factor=number(rope, "factor"),
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        original_max_len=original_of(rope, hf),
    )


def read_dynamic(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of dynamic scaling. transformers takes max_position_embeddings as the original length."""
    if hf.get(MAX_POSITIONS) is None:
        raise BadInput(f"config.json: RoPE scaling 'dynamic' needs {MAX_POSITIONS}")
    return dict(factor=number(rope, "factor"), original_max_len=hf[MAX_POSITIONS])


def read_yarn(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of YaRN. transformers treats 0 and null as absent."""
    found = factor_and_original(rope, hf)
    found |= {name: number(rope, name) for name in ("beta_fast", "beta_slow") if rope.get(name)}
    scales = [name for name in ("mscale", "mscale_all_dim") if rope.get(name)]
    if len(scales) == 2 and "attention_factor" not in found:
        found |= {name: number(rope, name) for name in scales}
    return found | ({"truncate": rope["truncate"]} if "truncate" in rope else {})


def read_longrope(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of longrope."""
    factors = {name: numbers(rope, name) for name in ("short_factor", "long_factor")}
    return factor_and_original(rope, hf) | factors


def numbers(values: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """Returns a list as floats. Raises BadInput for anything but a list of numbers."""
    found = values[key]
    if not isinstance(found, list) or any(type(one) not in (int, float) for one in found):
        raise BadInput(f"config.json: {key}={short(found)} must be a list of numbers; fetch it again")
    return tuple(map(float, found))


READERS = dict(linear=read_linear, llama3=read_llama3, dynamic=read_dynamic, yarn=read_yarn, longrope=read_longrope)


def factor_and_original(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """factor, original_max_len and attention_factor if present, for yarn and longrope."""
    original = original_of(rope, hf)
    if rope.get("factor") is not None:
        factor = number(rope, "factor")
    elif hf.get(MAX_POSITIONS) is not None:
        factor = hf[MAX_POSITIONS] / original
    else:
        raise BadInput(f"config.json: RoPE scaling has no factor, and no {MAX_POSITIONS} to derive it from")
    found_values = rope.get("attention_factor") is not None
    return dict(factor=factor, original_max_len=original) | (
        dict(attention_factor=number(rope, "attention_factor")) if found_values else {}
    )


def original_of(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> int:
    """Returns the context before the extension. Raises BadInput if it is absent or contradictory."""
    name = rope.get("rope_type", rope.get("type"))
    original = rope.get(ORIGINAL_POSITIONS, hf.get(MAX_POSITIONS))
    if name == "longrope":  # Phi-3's files have it only outside
        original = rope.get(ORIGINAL_POSITIONS, hf.get(ORIGINAL_POSITIONS, hf.get(MAX_POSITIONS)))
    if original is None or hf.get(ORIGINAL_POSITIONS, original) != original:
        raise BadInput(
            f"config.json: RoPE scaling {name!r} needs {ORIGINAL_POSITIONS}, in rope_scaling and nowhere else"
        )
    return original


def write_rope(cfg: LlamaConfig) -> dict[str, Any]:
    """Returns rope_theta and rope_scaling, which transformers 4 and 5 both read.

    With max_position_embeddings where it affects the result: the original length of dynamic, and in transformers 4 the
    factor of yarn and longrope.
    """
    scaling = cfg.rope_scaling
    if scaling is None:
        return dict(rope_theta=cfg.rope_base, rope_scaling=None)
    found_values = {key: getattr(scaling, setting) for key, setting in SCALING_KEYS[scaling.name].items()}
    found_values = {name: list(value) if isinstance(value, tuple) else value for name, value in found_values.items()}
    found_values.update(truncate=None if scaling.truncate else False)  # older releases do not know this key
    named = {name: value for name, value in found_values.items() if value is not None}
    written = dict(rope_theta=cfg.rope_base, rope_scaling=dict(rope_type=scaling.name, factor=scaling.factor) | named)
    if scaling.name == "dynamic":
        written[MAX_POSITIONS] = scaling.original_max_len
    elif scaling.name in ("yarn", "longrope"):
        written[MAX_POSITIONS] = round(scaling.factor * scaling.original_max_len)
    return written


def with_static_rope(cfg: AnyModelConfig) -> AnyModelConfig:
    """Returns cfg with length-dependent scaling resolved for its row_len, so that other tools compute the same for any
    length: dynamic becomes a larger rope_base, and longrope uses one list of factors.
    """
    scaling = getattr(cfg, "rope_scaling", None)
    if not isinstance(cfg, LlamaConfig) or scaling is None or scaling.row_len is None or scaling.name not in BY_LENGTH:
        return cfg
    if scaling.name == "dynamic":
        base = dynamic_ntk_base(cfg.rope_dim, cfg.rope_base, scaling)
        return dataclasses.replace(cfg, rope_base=base, rope_scaling=None)
    chosen = longrope_factors(scaling)
    one = dataclasses.replace(scaling, short_factor=chosen, long_factor=chosen, row_len=None)
    return dataclasses.replace(cfg, rope_scaling=one)
