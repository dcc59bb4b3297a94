"""Weights of a muP model as those of an equal model without muP."""

import dataclasses

from jaxscale.core.models.config import ModelConfig
from jaxscale.core.models.lora_mup_config import STACKED, mup_scales


def folding_factors(model: ModelConfig) -> dict[str, float]:
    """Returns {parameter, relative to its layer: factor of its weights} that give the same model without muP.
    Factors of 1 are omitted."""
    if getattr(model, "mup", None) is None:
        return {}
    scales = mup_scales(model)
    factors = {"final_norm": scales.output}
    query = ("q_norm",) if model.qk_norm else ("wq", "bias_q")
    factors |= {f"attention.{name}": scales.scores for name in query}
    outputs = ("attention_out_norm", "mlp_out_norm")
    if getattr(model, "norm_placement", "before") == "before":
        outputs = ("attention.wo", "attention.bias_o", "mlp.down", "mlp.shared.down")
    factors |= {name: scales.residual for name in outputs}
    return {name: factor for name, factor in factors.items() if factor != 1.0}


def without_mup(model: ModelConfig) -> ModelConfig:
    """Returns the config of the model whose weights are multiplied by folding_factor()."""
    return model if getattr(model, "mup", None) is None else dataclasses.replace(model, mup=None)


def folding_factor(model: ModelConfig, name: str) -> float:
    """Returns the factor of a parameter ('blocks/attention/wq') that gives the same model without muP."""
    return folding_factors(model).get(STACKED.sub("", name.replace("/", "."), count=1), 1.0)
