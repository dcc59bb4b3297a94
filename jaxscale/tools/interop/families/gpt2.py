"""GPT-2 (GPT2LMHeadModel in transformers), with matrices [in, out], and queries, keys and values in one tensor."""

from collections.abc import Mapping
from typing import Any

from jaxscale.core.models.gpt2_bert_t5_config import Gpt2Config
from jaxscale.tools.interop.families.family import HfFamily, TensorSpec
from jaxscale.tools.interop.families.settings import refuse_unless

DEFAULTS = dict(  # defaults of transformers' GPT2Config for absent keys
    vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12, n_inner=None, activation_function="gelu_new",
    layer_norm_epsilon=1e-5, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
    add_cross_attention=False, tie_word_embeddings=True,
)  # fmt: skip
ALIASES = dict(  # {alias that transformers prefers: key}
    hidden_size="n_embd", max_position_embeddings="n_positions", num_attention_heads="n_head",
    num_hidden_layers="n_layer",
)  # fmt: skip
CONFIG_KEYS = dict(  # {setting: key}
    vocab_size="vocab_size", num_layers="n_layer", embed_dim="n_embd", num_heads="n_head", max_seq_len="n_positions",
    norm_eps="layer_norm_epsilon",
)  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> Gpt2Config:
    """Returns the settings of a config.json. Dropout is not read, since it is a setting of the run."""
    hf = {**DEFAULTS, **hf}
    refuse_unless(hf, activation_function=("gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=(True,))
    refuse_unless(hf, scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))
    aliases = {name: (hf[key],) for name, key in ALIASES.items()}
    refuse_unless(hf, tie_word_embeddings=(True,), n_inner=(None, 4 * hf["n_embd"]), **aliases)
    return Gpt2Config(**{setting: hf[key] for setting, key in CONFIG_KEYS.items()})


def write_config(cfg: Gpt2Config) -> dict[str, Any]:
    """Returns the config.json keys of a GPT-2."""
    written = {key: getattr(cfg, setting) for setting, key in CONFIG_KEYS.items()}
    return written | dict(activation_function="gelu_new", tie_word_embeddings=True)


ROWS = (
    TensorSpec("embedding", "wte.weight", inputs=1),
    TensorSpec("position_embedding", "wpe.weight", inputs=1),
    TensorSpec("blocks/scale_attention", "h.{layer}.ln_1.weight"),
    TensorSpec("blocks/bias_attention", "h.{layer}.ln_1.bias"),
    TensorSpec(tuple(f"blocks/attention/w{name}" for name in "qkv"), "h.{layer}.attn.c_attn.weight", 1),
    TensorSpec(tuple(f"blocks/attention/bias_{name}" for name in "qkv"), "h.{layer}.attn.c_attn.bias"),
    TensorSpec("blocks/attention/wo", "h.{layer}.attn.c_proj.weight", inputs=2),
    TensorSpec("blocks/attention/bias_o", "h.{layer}.attn.c_proj.bias"),
    TensorSpec("blocks/scale_mlp", "h.{layer}.ln_2.weight"),
    TensorSpec("blocks/bias_mlp", "h.{layer}.ln_2.bias"),
    TensorSpec("blocks/mlp/up", "h.{layer}.mlp.c_fc.weight", inputs=1),
    TensorSpec("blocks/mlp/bias_up", "h.{layer}.mlp.c_fc.bias"),
    TensorSpec("blocks/mlp/down", "h.{layer}.mlp.c_proj.weight", inputs=1),
    TensorSpec("blocks/mlp/bias_down", "h.{layer}.mlp.c_proj.bias"),
    TensorSpec("scale_final", "ln_f.weight"),
    TensorSpec("bias_final", "ln_f.bias"),
)
GPT2 = HfFamily(
    "gpt2",
    ("GPT2LMHeadModel", "GPT2Model"),
    read_config,
    write_config,
    ROWS,
    keys=(*DEFAULTS, *ALIASES),
    prefixes=("transformer.", ""),  # the checkpoints on the Hub have no prefix
    left_out=(r".*\.attn\.(bias|masked_bias)",),  # the causal mask
)
