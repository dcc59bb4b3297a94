"""How a remat policy tells what attention's backward pass needs, so that it can be kept."""

from typing import Any

# The name of the output and, in forms that have one, of the logarithm of each row's softmax sum: kept together, the
# backward pass runs without a second forward pass of the kernel.
ATTENTION_OUT = "attention_out"


def kept_by_kernel(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of jax.checkpoint: whether this is cuDNN's forward pass, whose two results are not ours to name."""
    return primitive.name == "dot_product_attention_fwd_wrapper"
