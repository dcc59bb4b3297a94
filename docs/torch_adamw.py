"""A plain loop in torch, AdamW and a cosine, on the rows of `python -m benchmarks.time_to_loss`.

    python -m benchmarks.time_to_loss --config=configs/quickstart.py --against='python docs/torch_adamw.py'

Needs torch and transformers, of any environment: `python` may be the path of another one.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
import transformers

HEAD_STD = 0.02


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, and prints a line of JSON: tokens trained on and the loss of the held-out rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="with rows.npz and model.json, written by jaxscale")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=8, help="of a step")
    parser.add_argument("--peak_lr", type=float, default=2e-3)
    parser.add_argument("--min_lr", type=float, default=1e-4)
    parser.add_argument("--init", default="jaxscale", choices=("jaxscale", "transformers"), help="initial weights")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    flags = parser.parse_args(arguments)
    torch.manual_seed(0)
    folder = pathlib.Path(flags.folder)
    rows = {name: torch.from_numpy(array) for name, array in np.load(folder / "rows.npz").items()}
    steps = min(flags.tokens // rows["tokens"].shape[1], len(rows["tokens"])) // flags.rows
    config = transformers.LlamaConfig(**json.loads((folder / "model.json").read_text()))
    model = transformers.LlamaForCausalLM(config).float()
    if flags.init == "jaxscale":
        initialise(model, config.num_hidden_layers)
    narrow = torch.autocast("cpu", dtype=torch.bfloat16, enabled=flags.dtype == "bfloat16")

    def losses(tokens: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with narrow:
            logits = model(tokens.long(), use_cache=False).logits
        flat = logits.float().flatten(0, 1), targets.long().flatten()
        each = torch.nn.functional.cross_entropy(*flat, reduction="none")
        return (each * weights.flatten()).sum(), weights.sum()

    train(model, losses, rows, steps, flags)
    with torch.no_grad():
        held = [rows[f"held_{name}"].split(flags.rows) for name in ("tokens", "targets", "weights")]
        total, count = (sum(parts) for parts in zip(*(losses(*part) for part in zip(*held))))
    print(json.dumps({"tokens": steps * flags.rows * rows["tokens"].shape[1], "loss": float(total / count)}))


def initialise(model: torch.nn.Module, layers: int) -> None:
    """Draws the weights as jaxscale's Llama does; those of transformers all have a deviation of 0.02."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            std = weight.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * layers)
            if "embed_tokens" in name or "lm_head" in name:
                std = 1.0 if "embed_tokens" in name else HEAD_STD
            torch.nn.init.normal_(weight, std=std)


def train(model: torch.nn.Module, losses: Callable, rows: dict[str, torch.Tensor], steps: int, flags) -> None:
    """All steps: a warmup of 5%, a cosine, clipping at a norm of 1, decay of all matrices but the embedding."""
    decayed = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=flags.peak_lr, betas=(0.9, 0.95), fused=True)
    warmup = math.ceil(0.05 * steps)
    for step in range(steps):
        part = slice(step * flags.rows, (step + 1) * flags.rows)
        total, count = losses(rows["tokens"][part], rows["targets"][part], rows["weights"][part])
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        along = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        cosine = flags.min_lr + (flags.peak_lr - flags.min_lr) * 0.5 * (1 + math.cos(math.pi * along))
        for group in optimizer.param_groups:
            group["lr"] = flags.peak_lr * (step + 1) / warmup if step < warmup else cosine
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
