"""Continued training of a converted model or your own run on longer sequences.

    python -m jaxscale.main --config=configs/long_context.py:4,runs/base --config.data.files='books/*.txt'
    python -m jaxscale.main --config=configs/long_context.py:32,runs/base --config.mesh.context=8    # devices per row

The argument is the length factor and the work folder of the base model (default: the model of configs/quickstart.py).
RoPE is scaled with YaRN, or with the model's own scaling. 400 steps of 64 sequences: arXiv:2309.00071, section 4.
Cost: 6 FLOPs per parameter and token, plus attention, which grows with the sequence length. Not measured.
"""

import json

import ml_collections
import quickstart
from etils import epath


def get_config(arg="4"):
    times, _, base = arg.partition(",")
    if not times.isdecimal() or int(times) < 2:
        raise TypeError(f"the argument is {arg!r}; write FACTOR,WORKDIR, such as 4,runs/base; FACTOR is at least 2")
    file = epath.Path(base) / "config.json"
    begun = json.loads(file.read_text()) if base and file.exists() else {}
    if base and "config" not in begun:
        raise TypeError(f"{file} is missing or not from a run; use the work folder of a run or of jaxscale convert")
    run, converted = begun["config"] if base else quickstart.get_config().to_dict(), begun.get("converted") or {}
    rows = (converted.get("kept") or {}).get("max_position_embeddings") or run["seq_len"]
    scaling = run["model"].get("rope_scaling") or dict(name="yarn", factor=1.0, original_max_len=rows)
    if scaling["name"] not in ("linear", "llama3", "yarn"):
        raise TypeError(f"{file} has rope_scaling.name={scaling['name']!r}, which depends on row_len and has no factor")
    changed = dict(rope_scaling={**scaling, "factor": scaling["factor"] * int(times)}, remat="full", remat_save=())
    c = ml_collections.ConfigDict(dict(model=run["model"] | changed))
    c.seq_len, c.batch_tokens, c.train_tokens = int(times) * rows, "64 rows", "400 steps"
    c.optim = dict(peak_lr=2e-5, min_lr=2e-6, warmup_tokens="20 steps", weight_decay=0.0)
    c.data = dict(name="files", tokenizer="bytes")
    if base:
        c.init, found = dict(from_path=base), sorted((epath.Path(base) / "tokenizer").glob("tokenizer.[jm]*"))
        c.data.tokenizer = str(found[0]) if found else run["data"]["tokenizer"] or "bytes"
    c.mesh, c.eval, c.checkpoint = dict(fsdp=-1, context=1), dict(every_steps=50), dict(save_every_steps=50)
    return c
