"""Imports a Hugging Face model as a work folder, and exports the weights of a work folder for other tools.

  jaxscale convert --from=llama-hf --workdir=runs/llama                 float32 step 0, tokenizer, config.json
  jaxscale convert --from=Qwen/Qwen3-8B --workdir=runs/qwen             downloaded from the Hub first
  jaxscale train   --config=configs/llama3_8b.py --init_from=runs/llama    trains the imported model

  jaxscale convert --workdir=runs/mine --to=mine-hf                     safetensors, config.json, tokenizer: bfloat16
  jaxscale convert --workdir=gs://BUCKET/run --step=4000 --ema --to=gs://BUCKET/out --dtype=float32
  jaxscale convert --workdir=runs/mine --to=mine-hf --push=OWNER/NAME   uploaded to the Hub, using the variable HF_TOKEN

  jaxscale convert --from=adapter-hf --base=llama-hf --workdir=runs/merged            a PEFT adapter, merged
  jaxscale convert --from=adapter-hf --base=llama-hf --workdir=runs/start --adapter   or separate, for further training
  jaxscale convert --workdir=runs/tuned --to=adapter-hf --adapter                     a LoRA run's adapters, for PEFT

Checkpoints of jaxscale have float32 weights: 4 bytes per parameter, twice the size of a bfloat16 file. One tensor is in
memory at a time, in its own dtype, plus about 0.6 GB: a 70B model can be converted on a machine with 16 GB.
The same command resumes a killed conversion. Pickled files (.bin, .pt) are never read.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxscale import units
from jaxscale.api.conversion import ConvertOptions, convert
from jaxscale.cli.ckpt import TransferProgress
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system.exits import print_stderr, put


@dataclasses.dataclass(frozen=True)
class ConvertFlags(ConvertOptions):
    no_config = "the settings are read from the model's config.json"

    json: bool = flag(False, "prints one JSON object at the end")


@command(ConvertFlags, alone="--help")
def main(arguments: Arguments) -> None:
    """Converts the model and prints a summary."""
    flags = arguments.flags
    done = convert(flags, say=print_stderr, progress=TransferProgress)
    left_out = done["config"]["left_out"] if flags.from_ else []
    if left_out and not flags.json:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        print_stderr(f"not imported, since the model does not use them: {', '.join(left_out[:3])}{more}")
    put(json.dumps(done) if flags.json else import_line(done) if flags.from_ else export_line(done, flags.adapter))


def import_line(done: Mapping[str, Any]) -> str:
    """Returns a summary of an import, as one line."""
    size, adapter = units.size(done["num_bytes"]), done["config"].get("adapter")
    line = f"{done['workdir']}: step 0, {done['model_type']}, {units.count(done['num_params'])} parameters in float32"
    line += f" ({size}, {done['num_leaves']} arrays){resumed_text(done)}"
    line += f"; adapter {adapter}" if adapter else ""
    return f"{line}; start training from it with --init_from={done['workdir']}"


def export_line(done: Mapping[str, Any], adapter: bool) -> str:
    """Returns a summary of an export, as one line."""
    kind = f"an adapter of {done['model_type']}" if adapter else done["model_type"]
    line = f"{done['to']}: step {done['step']} as {kind}, {done['num_tensors']} tensors in {done['dtype']}"
    line += f" ({units.size(done['num_bytes'])}, {done['num_files']} file{'s' * (done['num_files'] > 1)})"
    return line + resumed_text(done) + (f"; pushed: {done['pushed']}" if done.get("pushed") else "")


def resumed_text(done: Mapping[str, Any]) -> str:
    """Returns the number of bytes that an earlier run had converted, as text, or ''."""
    return f", {units.size(done['kept_bytes'])} already converted" if done["kept_bytes"] else ""
