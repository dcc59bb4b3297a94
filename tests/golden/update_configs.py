"""Writes configs.json, the resolved settings of every file in configs/: python tests/golden/update_configs.py

Run it when a config or a default was changed on purpose, and commit the result by itself, with the reason.
"""

import json
import pathlib

from jaxscale import schema
from jaxscale.settings.config_file import load_config

HERE = pathlib.Path(__file__).parent
CONFIGS = HERE.parent.parent / "configs"
GOLDEN = HERE / "configs.json"
ARGUMENTS = {  # of files that take one
    "auto": ("depth=4", "depth=12", "depth=24"),
    "finetune": ("full", "lora"),
    "long_context": ("4",),
    "small_mixture": ("experts", "dense"),
}


def config_paths() -> dict[str, str]:
    """{name: path}, with each argument of a file that takes one."""
    found = {}
    for file in sorted(CONFIGS.glob("*.py")):
        for argument in ARGUMENTS.get(file.stem, ("",)):
            ending = f":{argument}" if argument else ""
            found[file.stem + ending] = str(file) + ending
    return found


def resolved(path: str) -> dict:
    """{dotted name: value} of every setting, and what follows from them."""
    cfg = load_config(path)
    sizes = {"num_params": cfg.model.num_params, "flops_per_token": cfg.flops_per_token}
    return sizes | json.loads(json.dumps(schema.flatten(schema.to_dict(cfg))))


if __name__ == "__main__":
    golden = {name: resolved(path) for name, path in config_paths().items()}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{GOLDEN}: {len(golden)} configs")
