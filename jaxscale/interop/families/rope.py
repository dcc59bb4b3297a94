"""RoPE of a config.json in both of its spellings, read and written: theta, and how it is scaled for long contexts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from jaxscale.interop.families.settings import FAR, NEAR, number
from jaxscale.models import AnyModelConfig
from jaxscale.models.llama_config import LlamaConfig
from jaxscale.ops.config import BY_LENGTH, RopeName, RopeScaling
from jaxscale.ops.rope import dynamic_ntk_base, longrope_factors
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.units import or_list

LONGEST, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", ORIGINAL)  # all that RoPE reads


def same_words(*names: str) -> dict[str, str]:
    """{name: name} of what both sides call the same."""
    return {name: name for name in names}


OLD_LENGTH = {ORIGINAL: "original_max_len"}
WRITTEN: dict[str, dict[str, str]] = dict(  # {kind of scaling: {their key: our setting}}, beside rope_type and factor
    linear={},
    dynamic={},
    llama3=same_words("low_freq_factor", "high_freq_factor") | OLD_LENGTH,
    yarn=same_words("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim") | OLD_LENGTH,
    longrope=same_words("short_factor", "long_factor", "attention_factor") | OLD_LENGTH,
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
            f"config.json: rope_scaling stands beside rope_parameters, whose rope_theta={short(unread)} transformers "
            f"then does not read: it takes {short(rope['rope_theta'])}; write one of the two, with rope_theta in it"
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
    rope = {**usual, **(parameters.get(layers) or {"rope_type": "default"}), **added}
    rope.pop("truncate", None)  # transformers looks for it beside the types of layers, where it cannot be
    rope.setdefault(ORIGINAL, hf.get(LONGEST))  # nor does it look outside for this one
    return scaled(rope, hf)


def scaled(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(rope_base, rope_scaling) of RoPE's own keys. Args: hf: the config.json they stand in."""
    base, name = number(rope, "rope_theta"), rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", name) != name:
        raise BadInput(
            f"config.json: RoPE has type={short(rope['type'])}, and transformers reads its rope_type={short(name)}; "
            "write rope_type alone"
        )
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor")) not in (None, 1.0):
        raise BadInput("config.json: partial_rotary_factor is not supported: RoPE here turns whole heads")
    if name == "default":
        return base, None
    if name not in READERS:
        known = or_list([repr(one) for one in ("default", *get_args(RopeName))])
        raise BadInput(f"config.json: RoPE scaling {short(name)} is not supported; it may be {known}")
    return base, RopeScaling(name=name, **READERS[name](rope, hf))


def read_linear(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of our RopeScaling."""
    return dict(factor=number(rope, "factor"))


def read_llama3(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """The same."""
    return dict(
        factor=number(rope, "factor"),
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        original_max_len=original_of(rope, hf),
    )


def read_dynamic(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """The same. transformers takes max_position_embeddings for the original context here."""
    if hf.get(LONGEST) is None:
        raise BadInput(f"config.json: RoPE scaling 'dynamic' needs {LONGEST}")
    return dict(factor=number(rope, "factor"), original_max_len=hf[LONGEST])


def read_yarn(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """The same. A 0 or none is what transformers takes for left out."""
    found = factor_and_original(rope, hf)
    found |= {name: number(rope, name) for name in ("beta_fast", "beta_slow") if rope.get(name)}
    scales = [name for name in ("mscale", "mscale_all_dim") if rope.get(name)]
    if len(scales) == 2 and "attention_factor" not in found:
        found |= {name: number(rope, name) for name in scales}
    return found | ({"truncate": rope["truncate"]} if "truncate" in rope else {})


def read_longrope(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """The same."""
    factors = {name: numbers(rope, name) for name in ("short_factor", "long_factor")}
    return factor_and_original(rope, hf) | factors


def numbers(values: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """A list of a config.json, as floats. Raises BadInput for what is none, or holds other things than numbers."""
    found = values[key]
    if not isinstance(found, list) or any(type(one) not in (int, float) for one in found):
        raise BadInput(f"config.json: {key}={short(found)} must be a list of numbers; fetch it again")
    return tuple(map(float, found))


READERS = dict(linear=read_linear, llama3=read_llama3, dynamic=read_dynamic, yarn=read_yarn, longrope=read_longrope)


def factor_and_original(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """factor, original_max_len and, where it is said, attention_factor, as yarn and longrope have them alike."""
    original = original_of(rope, hf)
    if rope.get("factor") is not None:
        factor = number(rope, "factor")
    elif hf.get(LONGEST) is not None:
        factor = hf[LONGEST] / original
    else:
        raise BadInput(f"config.json: RoPE scaling has no factor, and there is no {LONGEST} to take it from")
    said = rope.get("attention_factor") is not None
    return dict(factor=factor, original_max_len=original) | (
        dict(attention_factor=number(rope, "attention_factor")) if said else {}
    )


def original_of(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> int:
    """The context before the extension. Raises BadInput where it is not in RoPE's own keys, or said otherwise too."""
    name = rope.get("rope_type", rope.get("type"))
    original = rope.get(ORIGINAL, hf.get(LONGEST))
    if name == "longrope":  # of which Phi-3's files say it outside alone
        original = rope.get(ORIGINAL, hf.get(ORIGINAL, hf.get(LONGEST)))
    if original is None or hf.get(ORIGINAL, original) != original:
        raise BadInput(f"config.json: RoPE scaling {name!r} needs {ORIGINAL}, in rope_scaling and nowhere else")
    return original


def write_rope(cfg: LlamaConfig) -> dict[str, Any]:
    """rope_theta and rope_scaling: the spelling that transformers 4 and 5 both read.

    With max_position_embeddings where they are part of what is computed: every release takes the original context of
    dynamic from them, and transformers 4 the factor of yarn and longrope.
    """
    scaling = cfg.rope_scaling
    if scaling is None:
        return dict(rope_theta=cfg.rope_base, rope_scaling=None)
    said = {theirs: getattr(scaling, ours) for theirs, ours in WRITTEN[scaling.name].items()}
    said = {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}
    said.update(truncate=None if scaling.truncate else False)  # older releases do not know the word for the usual
    named = {name: value for name, value in said.items() if value is not None}
    written = dict(rope_theta=cfg.rope_base, rope_scaling=dict(rope_type=scaling.name, factor=scaling.factor) | named)
    if scaling.name == "dynamic":
        written[LONGEST] = scaling.original_max_len
    elif scaling.name in ("yarn", "longrope"):
        written[LONGEST] = round(scaling.factor * scaling.original_max_len)
    return written


def frozen(cfg: AnyModelConfig) -> AnyModelConfig:
    """The model as other tools can be told of it: with a row_len, what they choose by the length of a batch's rows is
    put down as it was chosen here, so that they compute the same in rows of every length.

    dynamic becomes a larger theta, and longrope has its chosen numbers for short and for long rows.
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
