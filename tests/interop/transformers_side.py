"""What transformers does in test_transformers.py, run by a Python that has it.

transformers_side.py make FOLDER           a small random model of each family in FOLDER/NAME/hf, in several files; one
                                           with experts also in FOLDER/NAME/joined, as this release holds them
transformers_side.py check FOLDER          loads FOLDER/NAME/hf and FOLDER/NAME/out and says how they differ
transformers_side.py keys FOLDER           what a config.json of each family may say to the class that reads it
transformers_side.py encode FOLDER TEXTS   the ids that AutoTokenizer of FOLDER/NAME/out gives for a JSON list
"""

import dataclasses
import json
import pathlib
import sys

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "parity"))
from make_family_references import EAGER, models, randomise  # noqa: E402

NEW_TOKENS = 24


def make(folder):
    """Writes the models."""
    for seed, (name, (config, kind)) in enumerate(models().items()):
        torch.manual_seed(seed)
        model = kind(config).float().eval()
        randomise(model, seed)
        model.to(torch.bfloat16).save_pretrained(folder / name / "hf", max_shard_size="8KB")
        if with_experts(config):
            model.save_pretrained(folder / name / "joined", max_shard_size="8KB", save_original_format=False)


def with_experts(config):
    """Whether it is of a mixture of experts."""
    return hasattr(config, "num_experts_per_tok")


def greedy(model):
    """The ids that follow a prompt."""
    prompt = torch.arange(7, 15)[None]
    how = dict(do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0)
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)[0].tolist()


def check(folder):
    """{name: what is found}."""
    found = {}
    for name, (config, _) in models().items():
        load = transformers.AutoModelForCausalLM.from_pretrained
        how = dict(torch_dtype=torch.float32) | (EAGER if with_experts(config) else {})
        before = load(folder / name / "hf", **how)
        after, info = load(folder / name / "out", **how, output_loading_info=True)
        found[name] = {
            "class": type(after).__name__,
            "wrong": {key: sorted(map(str, value)) for key, value in info.items() if value},
            "same_text": greedy(before) == greedy(after),
            "text": greedy(after),
        }
    return found


def keys(folder):
    """{model_type: keys}"""
    kinds = {config.model_type: type(config) for config, _ in models().values()}
    return {name: sorted({f.name for f in dataclasses.fields(k)} | set(k.attribute_map)) for name, k in kinds.items()}


def encode(folder, texts):
    """{name: {ids, texts again, end}}."""
    found = {}
    for place in sorted(folder.iterdir()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(place / "out")
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        again = [tokenizer.decode(one, skip_special_tokens=True) for one in ids]
        found[place.name] = {"ids": ids, "again": again, "eos": tokenizer.eos_token_id}
    return found


if __name__ == "__main__":
    verb, folder, *rest = sys.argv[1:]
    folder = pathlib.Path(folder)
    result = encode(folder, json.loads(rest[0])) if rest else {"make": make, "check": check, "keys": keys}[verb](folder)
    print(json.dumps(result))
