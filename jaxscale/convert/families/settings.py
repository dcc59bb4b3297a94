"""Reading a config.json: what it leaves out, what must be as our models compute it, and RoPE in its two spellings."""

from collections.abc import Mapping
from typing import Any

from jaxscale.exits import BadInput
from jaxscale.models.llama import LlamaConfig
from jaxscale.ops.rope import RopeScaling
from jaxscale.units import or_list


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


def read_rope(hf: Mapping[str, Any], kind: str | None = None) -> tuple[float, RopeScaling | None]:
    """(rope_base, rope_scaling) of a config.json, in the words of transformers 4 (rope_theta and rope_scaling) or 5
    (rope_parameters). kind: the type of layer, where each has its own.

    Raises BadInput for a scaling that our RoPE does not have.
    """
    rope = hf.get("rope_parameters") or {}
    rope = {**(rope.get(kind) or {})} if kind and kind in rope else {**rope}
    base = rope.get("rope_theta", hf["rope_theta"])
    scaling = rope if "rope_type" in rope or not hf.get("rope_scaling") else {**hf["rope_scaling"]}
    name = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise BadInput("config.json: partial_rotary_factor is not supported: RoPE here turns whole heads")
    if name == "default":
        return float(base), None
    if name == "linear":
        return float(base), RopeScaling(name="linear", factor=float(scaling["factor"]))
    if name != "llama3":
        raise BadInput(
            f"config.json: RoPE scaling {name!r} is not supported; it may be 'default', 'linear' or 'llama3'"
        )
    return float(base), RopeScaling(
        name="llama3",
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_len=scaling["original_max_position_embeddings"],
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
            original_max_position_embeddings=scaling.original_max_len,
        )
    return dict(rope_theta=cfg.rope_base, rope_scaling=named)
