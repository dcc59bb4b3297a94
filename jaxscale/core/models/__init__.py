"""Table of models by name. To add a model, add its file, its settings and a line of MODELS (docs/howto/add_model.md).

Importing this package imports neither JAX nor Flax. The module of a model is imported when the model is made.
"""

import functools
import operator
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxscale.core.models.config import ModelConfig, ModelKind

# {name: (settings class, module class)}
MODELS = {
    "llama": ("jaxscale.core.models.llama_config:LlamaConfig", "jaxscale.core.models.llama:Llama"),
    "gpt2": ("jaxscale.core.models.gpt2_bert_t5_config:Gpt2Config", "jaxscale.core.models.gpt2_bert:Gpt2"),
    "encoder": ("jaxscale.core.models.gpt2_bert_t5_config:EncoderConfig", "jaxscale.core.models.gpt2_bert:Encoder"),
    "t5": ("jaxscale.core.models.gpt2_bert_t5_config:T5Config", "jaxscale.core.models.t5:T5"),
}
if TYPE_CHECKING:  # a type checker cannot read MODELS; ModelConfig declares the attributes of all models
    AnyModelConfig: TypeAlias = ModelConfig


@functools.cache
def settings_classes() -> dict[str, type[ModelConfig]]:
    """Returns the settings class of each model."""
    return {name: pkgutil.resolve_name(cls) for name, (cls, _) in MODELS.items()}


def __getattr__(name: str) -> Any:
    """Returns AnyModelConfig, the union of all settings classes. The first access imports the classes."""
    if name != "AnyModelConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return functools.reduce(operator.or_, settings_classes().values())


def model_class(cfg: ModelConfig) -> Callable[..., Any]:
    """Returns the module class for model settings; see core.models.model.Model."""
    return pkgutil.resolve_name(MODELS[cfg.name][1])


def names_of(kind: ModelKind) -> list[str]:
    """Returns the names of models of this kind."""
    return [name for name, settings in settings_classes().items() if settings.kind == kind]
