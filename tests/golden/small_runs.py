"""Small runs of many kinds, for comparing two versions of the program; each has a name, as in `small_runs.py:zero2`.

The text is in the folder that SMALL_RUNS_DATA names; compare_versions.py writes it.
"""

import os

import ml_collections

LLAMA = dict(name="llama", vocab_size=272, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8,
             mlp_dim=64, compute_dtype="float32", attention="xla")  # fmt: skip
RELATIVE = LLAMA | dict(num_layers=3, qkv_bias=True, qk_norm=True, norm_placement="both", zero_centred_norms=True,
                        activation="gelu_tanh", scaled_embeddings=True, tied_embeddings=True, query_scalar=5.0,
                        attention_window=16, global_every=2, attention_softcap=30.0, logit_softcap=20.0,
                        compute_dtype="bfloat16")  # fmt: skip
STACK = LLAMA | dict(num_layers=4, remat="full")
EXPERTS = dict(number=8, chosen=2, mlp_dim=16, bias=True)
MIXTURE = LLAMA | dict(experts=EXPERTS)
GPT2 = dict(name="gpt2", vocab_size=272, num_layers=2, embed_dim=32, num_heads=4, max_seq_len=64, dropout=0.1,
            compute_dtype="float32", attention="xla")  # fmt: skip
ENCODER = dict(name="encoder", vocab_size=272, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64, max_seq_len=64,
               compute_dtype="float32", attention="xla")  # fmt: skip
T5 = dict(name="t5", vocab_size=304, num_layers=2, embed_dim=32, num_heads=4, head_dim=8, mlp_dim=64,
          compute_dtype="float32", attention="xla")  # fmt: skip
SENTINELS = dict(first_sentinel_id=257, num_sentinels=15)
UL2 = dict(name="ul2", layout="one_row", mode_ids=dict(R=269, S=270, X=271), first_sentinel_id=257, num_sentinels=12)
SPANS = dict(name="span_corruption", multiple_of=2, first_sentinel_id=257, num_sentinels=47)

DEVICES = {"one_device": 1, "offload": 1, "unrolled": 2}  # instead of 8
RUNS = {
    "one_device": dict(),
    "zero3": dict(train=dict(num_microbatches=2)),
    "zero2": dict(rules="zero2", mesh=dict(data=2), train=dict(num_microbatches=2, reduce_dtype="bfloat16")),
    "zero1": dict(rules="zero1", mesh=dict(data=4), optim=dict(name="lion", decay="wsd")),
    "tensor": dict(mesh=dict(tensor=2), train=dict(aux_losses=dict(z_loss=1e-4))),
    "relative": dict(model=RELATIVE, mesh=dict(tensor=2)),
    "remat": dict(model=LLAMA | dict(remat="full")),
    "remat_minimal": dict(model=LLAMA | dict(remat="minimal"), train=dict(ema=dict(decay=0.9))),
    "unrolled": dict(model=LLAMA | dict(scan_layers=False)),
    "offload": dict(optim=dict(offload_moments=True, offload_params=True)),
    "float16": dict(model=LLAMA | dict(compute_dtype="float16")),
    "int8": dict(model=LLAMA | dict(matmul_dtype="int8")),
    "lora": dict(lora=dict(rank=4)),
    "groups": dict(
        optim=dict(
            groups=[dict(pattern="embed", lr_multiplier=0.5), dict(pattern="norm", frozen=True), dict(pattern=".")]
        )
    ),
    "gpt2": dict(model=GPT2),
    "t5": dict(model=T5, data=dict(objective=SPANS), mesh=dict(tensor=2)),
    "encoder": dict(model=ENCODER, data=dict(objective=dict(name="masked_lm", mask_id=258))),
    "prefix": dict(data=dict(objective=dict(name="prefix_lm"))),
    "ul2": dict(data=dict(objective=UL2)),
    "mixture": dict(data=dict(mixture=dict(one=0.7, two=0.3), gate=dict(on=True), packing="concat")),
    "statistics": dict(monitor=dict(statistics_every_steps=5)),
    "experts": dict(model=MIXTURE, mesh=dict(expert=2), expert=dict(exchange="gather")),
    "experts_sent": dict(model=MIXTURE, mesh=dict(expert=4), expert=dict(exchange="send")),
    "context": dict(mesh=dict(context=2)),
    "ring": dict(mesh=dict(context=4), context=dict(attention="ring")),
    "pipeline": dict(model=STACK, mesh=dict(pipeline=2), train=dict(num_microbatches=4)),
    "zero_bubble": dict(
        model=STACK, mesh=dict(pipeline=2), pipeline=dict(schedule="zero_bubble"), train=dict(num_microbatches=4)
    ),
    "leading_layer": dict(
        model=STACK | dict(num_layers=5, experts=EXPERTS | dict(first_dense=1)),
        mesh=dict(pipeline=2),
        train=dict(num_microbatches=4),
    ),
    "muon": dict(optim=dict(name="muon")),
    "adafactor": dict(optim=dict(name="adafactor")),
    "int8_moments": dict(optim=dict(moment_dtype="int8")),
    "ramp": dict(
        batch_tokens=32 * 64,
        batch_ramp=(("16 rows", 160 * 64),),
        seq_len_ramp=((32, 80 * 64),),
        train_tokens=480 * 64,
        optim=dict(warmup_tokens=32 * 64),
    ),
}


def get_config(name="zero3"):
    folder = os.environ["SMALL_RUNS_DATA"]
    c = dict(seq_len=64, batch_tokens=16 * 64, train_tokens="20 steps", seed=3, model=LLAMA)
    c["optim"] = dict(peak_lr=1e-2, min_lr=1e-3, warmup_tokens="2 steps")
    c["data"] = dict(name="files", tokenizer="bytes", files=dict(one=f"{folder}/one*.txt", two=f"{folder}/two*.txt"),
                     cache_dir=f"{folder}/cache")  # fmt: skip
    c["monitor"] = dict(log_every_steps=1, tensorboard=False, progress="off", statistics_every_steps=0)
    c["eval"] = dict(every_steps=10, num_rows=16)
    c["checkpoint"] = dict(save_every_steps=10)
    for group, values in RUNS[name].items():
        c[group] = c[group] | values if group != "model" and group in c and isinstance(values, dict) else values
    return ml_collections.ConfigDict(c)
