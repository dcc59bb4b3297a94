"""Brings a Hugging Face model in as a work folder, and takes the weights of a work folder out for other tools.

  jaxscale convert --from=llama-hf --workdir=runs/llama                 float32 step 0, tokenizer, config.json
  jaxscale convert --from=Qwen/Qwen3-8B --workdir=runs/qwen             fetched from the Hub first
  jaxscale train   --config=configs/llama3_8b.py --init_from=runs/llama    and it trains on

  jaxscale convert --workdir=runs/mine --to=mine-hf                     safetensors, config.json, tokenizer: bfloat16
  jaxscale convert --workdir=gs://BUCKET/run --step=4000 --ema --to=gs://BUCKET/out --dtype=float32
  jaxscale convert --workdir=runs/mine --to=mine-hf --push=OWNER/NAME   and onto the Hub; HF_TOKEN in the environment

  jaxscale convert --from=adapter-hf --base=llama-hf --workdir=runs/merged            an adapter of PEFT's, merged
  jaxscale convert --from=adapter-hf --base=llama-hf --workdir=runs/start --adapter   or kept beside, to train it on
  jaxscale convert --workdir=runs/tuned --to=adapter-hf --adapter                     a LoRA run's adapters, for PEFT

  --from=FOLDER           a Hugging Face model: config.json and safetensors, one file or many. Local or gs://. Or an
                          adapter of PEFT's: adapter_config.json and adapter_model.safetensors
                          Or OWNER/NAME, or its address at huggingface.co: fetched from the Hub (extra: hub), the
                          safetensors alone; HF_TOKEN in the environment for what is not public
  --revision=NAME         with that: a commit, a branch or a tag; main unless given
  --base=FOLDER           the model that the adapter is for; else the local folder that its adapter_config.json names.
                          With --to: the name that is written there; else what the run began with
  --workdir=FOLDER        with --from: the new work folder. With --to: the run whose weights go out
  --to=FOLDER             where the Hugging Face model goes; a new folder, local or gs://
  --step=N                the step to export; the newest unless given
  --adapter               with --from: keep the adapter beside the weights; with --to: export the adapters alone
  --ema                   export the average of the weights, where the run keeps one
  --dtype=bfloat16        or float32: of the exported tensors; adapters are float32 unless told otherwise
  --shard_bytes=5e9       of tensors in one file, at most
  --push=OWNER/NAME       send the finished folder to the Hub; a new repository is private
  --json                  one JSON object at the end

Weights are float32 in a checkpoint of jaxscale: 4 bytes a parameter, twice what a bfloat16 file has. One tensor is in
memory at a time, in its own type, and about 0.6 GB more: a 70B model converts on a machine with 16 GB.
A killed conversion goes on where it was when the same command is run again. Pickled files (.bin, .pt) are never read.
"""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from typing import Any

from jaxscale import schema, units
from jaxscale.checkpoint.cause import written
from jaxscale.checkpoint.config import CheckpointConfig
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.cli import run_verb
from jaxscale.cli.ckpt import Progress
from jaxscale.command_line import parse_arguments, take_switches, whole_number
from jaxscale.config import RunConfig
from jaxscale.data.config import DataConfig
from jaxscale.help_text import show_help
from jaxscale.interop import hub, tokenizer_files
from jaxscale.interop.exporting import FORMATS, config_of, export_step, open_step
from jaxscale.interop.importing import import_tensors, prepare_workdir
from jaxscale.interop.incoming import Incoming, open_incoming
from jaxscale.monitor.runinfo import run_info
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, put, tell
from jaxscale.system.redact import redacted

OPTIONS = ("from", "base", "revision", "workdir", "to", "step", "dtype", "shard_bytes", "push")
SWITCHES = ("adapter", "ema", "json")
OUT_ONLY = ("step", "dtype", "shard_bytes", "push")
SHARD_BYTES = 5_000_000_000  # what the Hub takes well in one file
LONGEST_ROW = 4096  # tokens, of the config that is written for a model that can read more


def main(argv: list[str]) -> int:
    """Converts and returns the exit code."""
    rest, on = take_switches(argv, OPTIONS, SWITCHES)
    arguments = parse_arguments(rest, OPTIONS)
    if arguments.help or not argv:
        show_help(__doc__)
        return 0
    options = arguments.options
    if arguments.config or arguments.overrides:
        raise BadInput("convert takes no --config: the model's own config.json says what it is")
    if ("from" in options) == ("to" in options):
        raise BadInput("convert needs --from=FOLDER to bring a model in, or --to=FOLDER to take one out, one of them")
    if "workdir" not in options:
        raise BadInput("convert needs --workdir=FOLDER, the work folder; see jaxscale convert --help")
    if "from" in options:
        if wrong := [name for name in (*OUT_ONLY, "ema") if name in options or name in on]:
            raise BadInput(f"--{wrong[0]} is for an export, with --to; it says nothing with --from")
        return bring_in(options, "adapter" in on, "json" in on)
    return take_out(options, on)


def bring_in(options: Mapping[str, str], keep_adapter: bool, as_json: bool) -> int:
    """Hugging Face's folder as a work folder."""
    workdir, revision = options["workdir"], options.get("revision")
    model = hub.fetch(options["from"], revision, "--from")
    base = hub.fetch(options["base"], None, "--base") if "base" in options else None
    found = open_incoming(
        model.folder if model else options["from"], base.folder if base else options.get("base"), keep_adapter
    )
    fetched = next((one for one in (model, base) if one and one.folder == found.name), None)
    cfg, files = found.cfg, found.files
    folder, journal = prepare_workdir(workdir, found.identity)
    config = run_config(found, folder)
    made = {
        "from": fetched.name if fetched else found.name,
        "model_type": found.family.model_type,
        "kept": found.kept,
        "left_out": found.left_out,
    }
    made |= {"revision": fetched.revision} if fetched else {}
    made |= {"identity": found.identity} | ({"adapter": found.adapter} if found.adapter else {})
    if generation := tokenizer_files.read_object(files.get(tokenizer_files.GENERATION, b"")):
        made["generation"] = generation
    run = {"config": schema.to_dict(config), "step": 0, "data": None, "ancestry": [], "converted": made, **run_info()}
    run = redacted(run)
    written(lambda: tokenizer_files.bring_in(files, folder), folder)
    written(lambda: paths.write_json(folder / "config.json", run), folder)
    done = import_tensors(folder, journal, found.pairs, found.tensors, run, Progress("convert"))
    for note in found.notes:
        tell(f"{found.name}: {note}")
    tell_odd(found, done.not_finite, as_json)
    count, size = units.count(cfg.num_params), units.size(done.num_bytes)
    line = f"{workdir}: step 0, {found.family.model_type}, {count} parameters in float32"
    line += f" ({size}, {done.num_leaves} arrays)"
    line += f", {units.size(done.kept_bytes)} of it were there already" if done.kept_bytes else ""
    line += f"; adapter {found.adapter}" if found.adapter else ""
    record = {"workdir": workdir, "model_type": found.family.model_type, "num_params": cfg.num_params, "config": made}
    put(json.dumps(record | dataclasses.asdict(done)) if as_json else f"{line}; train on with --init_from={workdir}")
    return 0


def run_config(found: Incoming, folder: Any) -> RunConfig:
    """The config of the work folder: the model, and what its tokenizer is. What is trained with it is another run's."""
    longest = found.cfg.max_seq_len or found.kept.get("max_position_embeddings") or LONGEST_ROW
    seq_len = max(2, min(int(longest), LONGEST_ROW))
    main = tokenizer_files.main_file(found.files)
    kept_at = folder / tokenizer_files.FOLDER
    data = {"tokenizer": os.fspath(kept_at / tokenizer_files.kept_name(main)) if main else ""}
    rows = dict(seq_len=seq_len, batch_tokens=seq_len, train_tokens=seq_len)
    return RunConfig(model=found.cfg, lora=found.lora, **rows, data=schema.from_dict(DataConfig, data))


def tell_odd(found: Incoming, not_finite: tuple[str, ...], quiet: bool) -> None:
    """Says what a person should know of the source, on stderr."""
    left_out = found.left_out
    if left_out and not quiet:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        tell(f"left out, as the model has no use for it: {', '.join(left_out[:3])}{more}")
    if not_finite:
        tell(f"WARNING: {', '.join(not_finite[:3])} of {found.name}: NaN or infinity among its values")
    if not tokenizer_files.main_file(found.files):
        missing = tokenizer_files.missing_tokenizer(found.files, paths.as_path(found.name))
        tell(f"no tokenizer was brought along: {missing}")


def take_out(options: Mapping[str, str], on: Collection[str]) -> int:
    """A step's weights as Hugging Face's folder, or its adapters as PEFT's."""
    adapter = "adapter" in on
    if "base" in options and not adapter:
        raise BadInput("--base says which model an adapter is for; give --adapter too")
    if "revision" in options:
        raise BadInput("--revision is of a model of the Hub that comes in, with --from")
    if adapter and "shard_bytes" in options:
        raise BadInput("--shard_bytes divides the files of a model; PEFT reads an adapter from one")
    to, dtype = options["to"], options.get("dtype", "float32" if adapter else "bfloat16")
    if dtype not in FORMATS:
        raise BadInput(f"--dtype={dtype} must be {units.or_list(FORMATS)}")
    if "push" in options:
        hub.check_push(options["push"], to)
    step = whole_number("step", options["step"], 0) if "step" in options else None
    workdir = paths.absolute(options["workdir"])
    checkpoints = Checkpoints(workdir / "checkpoints", CheckpointConfig())
    what = "ema" if "ema" in on else "params"
    step, source = open_step(checkpoints, step, what, adapter, options.get("base"))
    texts = tokenizer_files.of_run(workdir, source.run)
    config = source.adapter or config_of(source, dtype, texts.end_ids)
    files = {name: text for name, text in texts.files.items() if not (adapter and name == tokenizer_files.GENERATION)}
    push = lambda folder: hub.push_folder(folder, options["push"], f"jaxscale: step {step}, {dtype}")
    done = export_step(
        source,
        to,
        dtype=dtype,
        shard_bytes=shard_bytes("1e14" if adapter else options.get("shard_bytes")),
        texts=files,
        config=config,
        on_bytes=Progress(f"step {step}"),
        **({"send": push} if "push" in options else {}),
    )
    for note in texts.notes:
        tell(note)
    record = {"to": to, "step": step, "dtype": dtype, "model_type": source.family.model_type} | dataclasses.asdict(done)
    kind = f"an adapter of {source.family.model_type}" if adapter else source.family.model_type
    line = f"{to}: step {step} as {kind}, {done.num_tensors} tensors in {dtype}"
    line += f" ({units.size(done.num_bytes)}, {done.num_files} file{'s' * (done.num_files > 1)})"
    line += f", {units.size(done.kept_bytes)} of it were there already" if done.kept_bytes else ""
    line += f"; pushed: {done.pushed}" if done.pushed else ""
    put(json.dumps(record) if "json" in on else line)
    return 0


def shard_bytes(text: str | None) -> int:
    """The value of --shard_bytes. Raises BadInput if it is no number of bytes."""
    if text is None:
        return SHARD_BYTES
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 1 <= size < 1e15:
        raise BadInput(f"--shard_bytes={text} must be a number of bytes, such as 5e9")
    return int(size)


if __name__ == "__main__":
    run_verb("convert")
