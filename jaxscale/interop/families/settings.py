"""Reads a config.json: defaults, unsupported values, and RoPE in both of its spellings."""

from collections.abc import Mapping
from typing import Any

from jaxscale.models.llama_config import LlamaConfig
from jaxscale.ops.config import RopeScaling
from jaxscale.system.exits import BadInput
from jaxscale.units import or_list

NEAR, FAR = "sliding_attention", "full_attention"  # the types of layers
ORIGINAL = "original_max_position_embeddings"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", ORIGINAL)  # all that RoPE reads


def merged(defaults: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config with transformers' own value for each key that it leaves out."""
    return {**defaults, **hf}


def refuse_unless(hf: Mapping[str, Any], **allowed: tuple) -> None:
    """Raises BadInput for the first of these keys that is there with another value than one of those allowed."""
    for key, values in allowed.items():
        if key in hf and hf[key] not in values:
            known = or_list([repr(value) for value in values])
            raise BadInput(
                f"config.json: {key}={hf[key]!r} is not supported for {hf.get('model_type')}; it may be {known}"
            )


def read_rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(rope_base, rope_scaling) of a config.json, in the words of transformers 4 (rope_theta and rope_scaling) or 5
    (rope_parameters). Where both stand there, rope_scaling is taken whole and rope_parameters not at all, as
    transformers 5 does.

    Raises BadInput for a scaling that our RoPE does not have.
    """
    scaling, parameters = hf.get("rope_scaling") or {}, hf.get("rope_parameters") or {}
    rope = {"rope_theta": hf["rope_theta"], **(scaling or parameters)}
    if nested := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise BadInput(
            f"config.json: rope_parameters of {nested[0]} alone are not supported for {hf.get('model_type')}"
        )
    found, unread = scaled(rope, hf), parameters.get("rope_theta", rope["rope_theta"])
    if scaling and "rope_theta" not in scaling and unread != rope["rope_theta"]:
        raise BadInput(
            f"config.json: rope_scaling stands beside rope_parameters, whose rope_theta={unread!r} transformers then "
            f"does not read: it takes {rope['rope_theta']!r}; write one of the two, with rope_theta in it"
        )
    return found


def read_rope_of(hf: Mapping[str, Any], layers: str) -> tuple[float, RopeScaling | None]:
    """read_rope of one of Gemma 3's types of layers. rope_scaling is added to what rope_parameters say of the global
    ones. Raises BadInput as read_rope does."""
    parameters = hf.get("rope_parameters") or {}
    if beside := [key for key in parameters if key not in (FAR, NEAR)]:
        raise BadInput(
            f"config.json: rope_parameters has {beside[0]} beside the types of layers, where transformers does not "
            f"read it for {hf.get('model_type')}; put it into {FAR} and {NEAR}"
        )
    usual = {"rope_theta": hf["rope_theta" if layers == FAR else "rope_local_base_freq"]}
    added = (hf.get("rope_scaling") or {}) if layers == FAR else {}
    return scaled({**usual, **(parameters.get(layers) or {"rope_type": "default"}), **added}, hf)


def scaled(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(rope_base, rope_scaling) of RoPE's own keys. Args: hf: the config.json they stand in."""
    base, name = float(rope["rope_theta"]), rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", name) != name:
        raise BadInput(
            f"config.json: RoPE has type={rope['type']!r}, and transformers reads its rope_type={name!r}; "
            "write rope_type alone"
        )
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor")) not in (None, 1.0):
        raise BadInput("config.json: partial_rotary_factor is not supported: RoPE here turns whole heads")
    if name == "default":
        return base, None
    if name == "linear":
        return base, RopeScaling(name="linear", factor=float(rope["factor"]))
    if name != "llama3":
        raise BadInput(
            f"config.json: RoPE scaling {name!r} is not supported; it may be 'default', 'linear' or 'llama3'"
        )
    original = rope.get(ORIGINAL, hf.get("max_position_embeddings"))
    if original is None or hf.get(ORIGINAL, original) != original:
        raise BadInput(f"config.json: RoPE scaling 'llama3' needs {ORIGINAL}, in rope_scaling and nowhere else")
    return base, RopeScaling(
        name="llama3",
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_len=original,
    )


def write_rope(cfg: LlamaConfig) -> dict[str, Any]:
    """rope_theta and rope_scaling: the spelling that transformers 4 and 5 both read."""
    scaling = cfg.rope_scaling
    if scaling is None:
        return dict(rope_theta=cfg.rope_base, rope_scaling=None)
    named = dict(rope_type=scaling.name, factor=scaling.factor)
    if scaling.name == "llama3":
        named |= dict(
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
        ) | {ORIGINAL: scaling.original_max_len}
    return dict(rope_theta=cfg.rope_base, rope_scaling=named)
