"""Frequently requested models that are not supported, with the missing feature."""

INDEXED = "sparse attention with an indexer"
UNCOMPARED = "the attention of DeepSeek-V3, and was not compared with its reference code"
HYBRID = "layers that are not attention (a hybrid)"
RECURRENT = "no attention"
PART = "RoPE over a part of a head"
SHARED_GATE = "a gate on its shared expert"
UNSUPPORTED = dict(
    gpt_oss="sinks in its attention, and biases and limits in its experts",
    llama4="layers without RoPE, and experts whose inputs are multiplied by the router's scores",
    llama4_text="layers without RoPE, and experts whose inputs are multiplied by the router's scores",
    qwen2_moe=SHARED_GATE, phimoe="another router (SparseMixer)", dbrx="LayerNorm, and clipped queries",
    granitemoe="factors on what each block adds", granitemoeshared="factors on what each block adds",
    deepseek_v32=INDEXED, kimi_k2=UNCOMPARED, glm4_moe_lite=UNCOMPARED,
    glm4_moe=PART, minimax_m2=PART, jetmoe="experts in its attention",
    qwen3_next=HYBRID, qwen3_5=HYBRID, qwen3_5_text=HYBRID, qwen3_5_moe=HYBRID, qwen3_5_moe_text=HYBRID, jamba=HYBRID,
    bamba=HYBRID, nemotron_h=HYBRID, falcon_h1=HYBRID, zamba2=HYBRID, granitemoehybrid=HYBRID, lfm2=HYBRID,
    lfm2_moe=HYBRID, minimax=HYBRID, olmo_hybrid=HYBRID, mamba=RECURRENT, mamba2=RECURRENT,
)  # fmt: skip
