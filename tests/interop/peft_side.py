"""What PEFT does in test_peft.py, run by a Python that has it.

peft_side.py make FOLDER     for each case FOLDER/NAME: a small random model in base/, adapter/, tokens.json,
                             and losses.json: PEFT's mean loss of each batch, without and with the adapter
peft_side.py check FOLDER    {NAME: PEFT's losses with FOLDER/NAME/out as the adapter of FOLDER/NAME/base}
"""

import json
import pathlib
import sys

import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "parity"))
from make_family_references import EAGER, VOCAB, models, randomise  # noqa: E402

BATCHES = 3
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {  # name: (model, settings of LoraConfig, whether a run can go on from it)
    "llama": ("llama2", dict(r=4, lora_alpha=10, target_modules=["q_proj", "v_proj"]), True),
    "llama31_all": ("llama31", dict(r=3, lora_alpha=6, target_modules="all-linear", use_rslora=True), True),
    "qwen2_regex": ("qwen2", dict(r=2, lora_alpha=8, target_modules=r".*\.(k_proj|down_proj)"), True),
    "qwen3": ("qwen3", dict(r=4, lora_alpha=4, target_modules=ALL), True),
    "gemma2": ("gemma2", dict(r=4, lora_alpha=16, target_modules=ALL), True),
    "olmo2": ("olmo2", dict(r=2, lora_alpha=3.5, target_modules=["o_proj", "up_proj"]), True),
    "mistral_patterns": (
        "mistral",
        dict(r=4, lora_alpha=8, target_modules=ALL, rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.down_proj": 3},
             alpha_pattern={"v_proj": 20}, exclude_modules=["k_proj"]),
        False,
    ),
    "gemma3_one_layer": ("gemma3", dict(r=4, lora_alpha=8, target_modules=r".*layers\.2\.self_attn\.q_proj"), False),
    "gpt2": ("gpt2", dict(r=4, lora_alpha=12, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True), True),
    "mixtral": ("mixtral", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"]), True),
    "olmoe": ("olmoe", dict(r=2, lora_alpha=8, target_modules=["q_proj", "k_proj"], use_rslora=True), True),
    "llama_head": ("llama2", dict(r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"]), False),
}  # fmt: skip


def losses(model, tokens):
    """Mean cross-entropy of each batch."""
    found = []
    for rows in torch.tensor(tokens):
        with torch.no_grad():
            logits = model(rows).logits
        found.append(F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), rows[:, 1:].reshape(-1)).item())
    return found


def make(folder):
    """Writes the cases."""
    for seed, (name, (which, settings, goes_on)) in enumerate(CASES.items()):
        config, kind = models()[which]
        torch.manual_seed(seed)
        model = kind(config).float().eval()
        randomise(model, seed)
        place = folder / name
        model.save_pretrained(place / "base")
        tokens = np.random.default_rng(seed).integers(6, 58, (BATCHES, 2, 24)).tolist()
        told = {"before": losses(model, tokens), "goes_on": goes_on}
        wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
        for weight in (w for w_name, w in wrapped.named_parameters() if "lora_" in w_name):
            weight.data.normal_(0, 0.3)
        told["after"] = losses(wrapped, tokens)
        wrapped.save_pretrained(place / "adapter")
        config = json.loads((place / "adapter" / "adapter_config.json").read_text())
        if isinstance(settings["target_modules"], str):  # PEFT writes what it has made of it; people write this
            config["target_modules"] = settings["target_modules"]
            (place / "adapter" / "adapter_config.json").write_text(json.dumps(config))
        (place / "tokens.json").write_text(json.dumps(tokens))
        (place / "losses.json").write_text(json.dumps(told))


def check(folder):
    """Losses of what was written."""
    found = {}
    for place in sorted(path for path in folder.iterdir() if (path / "out").exists()):
        how = EAGER if "moe" in place.name or place.name == "mixtral" else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32, **how)
        wrapped = peft.PeftModel.from_pretrained(model, place / "out").eval()
        written = {n for n in peft.utils.load_peft_weights(str(place / "out"), device="cpu")}
        own = {n.replace(".default", "") for n, _ in wrapped.named_parameters() if "lora_" in n}
        found[place.name] = {
            "losses": losses(wrapped, json.loads((place / "tokens.json").read_text())),
            "wrong": sorted(written ^ own),
        }
    return found


if __name__ == "__main__":
    verb, folder = sys.argv[1:]
    print(json.dumps({"make": make, "check": check}[verb](pathlib.Path(folder))))
