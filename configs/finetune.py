"""Fine-tuning of a converted model or your own run on conversations, or on prompts with completions.

    python -m jaxscale.main --config=configs/finetune.py:lora,runs/base --config.data.files=chat.jsonl
    jaxscale ckpt merge_lora --workdir=runs/tuned --to=runs/merged

The argument is `full` or `lora`, and the work folder of the base model (default: the model of configs/quickstart.py).
State in float32: 12 bytes per parameter and 4 for its gradient (full), or 4 and 16 per adapter parameter (lora).
Cost: 6 FLOPs per parameter and token (full) or 4 (lora). Only the small model of docs/finetune.md was measured.
"""

import json

import ml_collections
import quickstart
from etils import epath

# Learning rates of arXiv:2307.09288, section 3.1 (full), and arXiv:2305.14314, table 9 (7B with adapters).
PEAK_LR = dict(full=2e-5, lora=2e-4)


def get_config(arg="full"):
    how, _, base = arg.partition(",")
    if how not in PEAK_LR:
        raise TypeError(f"the argument is {arg!r}; write full or lora, and a work folder, such as lora,runs/base")
    file = epath.Path(base) / "config.json"
    begun = json.loads(file.read_text()).get("config") if base and file.exists() else None
    if base and begun is None:
        raise TypeError(f"{file} is missing or not from a run; use the work folder of a run or of jaxscale convert")
    c = ml_collections.ConfigDict(dict(model=begun["model"] if base else quickstart.get_config().model.to_dict()))
    c.seq_len, c.train_tokens = (min(begun["seq_len"], 2048), "3 epochs") if base else (256, 1_000_000)
    c.optim = dict(peak_lr=PEAK_LR[how], min_lr=0.0, warmup_tokens="3%", b2=0.999, weight_decay=0.0)
    c.lora = dict(rank=16, alpha=32.0) if how == "lora" else {}
    if base and how == "lora" and begun.get("lora", {}).get("rank"):
        c.lora = begun["lora"]  # continues with the same adapters
    c.data = dict(name="chat", tokenizer="bytes")
    if base:
        c.init, found = dict(from_path=base), sorted((epath.Path(base) / "tokenizer").glob("tokenizer.[jm]*"))
        c.data.tokenizer = str(found[0]) if found else begun["data"]["tokenizer"] or "bytes"  # .json, or else .model
    c.batch_tokens, c.eval, c.checkpoint = "16 rows", dict(every_steps=50, num_rows=128), dict(save_every_steps=50)
    return c
