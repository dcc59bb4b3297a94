"""convert(): import and export of Hugging Face models."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from jaxscale import schema, units
from jaxscale.api import Say, silent
from jaxscale.config import RunConfig
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.storage_errors import stop_if_unwritable
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.monitor.runinfo import run_info
from jaxscale.settings.command_line import flag, number
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.redact import redacted
from jaxscale.tools.interop import hub, tokenizer_files
from jaxscale.tools.interop.exporting import FORMATS, Format, export_step, hf_config, open_step
from jaxscale.tools.interop.importing import import_tensors, prepare_workdir
from jaxscale.tools.interop.source_model import SourceModel, open_source_model

EXPORT_ONLY = ("step", "dtype", "shard_bytes", "push", "ema")
SHARD_BYTES = 5_000_000_000  # the Hub's recommended file size
MAX_SEQ_LEN = 4096  # maximum seq_len of the written config, for models with a longer context
MakeProgress = Callable[[str], Callable[..., None]]

no_progress: MakeProgress = lambda what: lambda *counts, **more: None


def bytes_of(name: str, text: str) -> int:
    """Parses a number of bytes. Raises BadInput if the text is not a number."""
    return int(number(f"--{name}", text, lambda found: 1 <= found < 1e15, "a number of bytes, such as 5e9"))


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """Options of an import (from_) or an export (to). They are also the flags of `jaxscale convert`."""

    from_: str | None = flag(
        None,
        "a folder, local or gs://, with a Hugging Face model (config.json, safetensors) or a PEFT adapter "
        "(adapter_config.json, adapter_model.safetensors); or OWNER/NAME, or its URL at huggingface.co, to download "
        "safetensors from the Hub (extra: hub), with the variable HF_TOKEN for private models",
        "FOLDER",
        name="from",
    )
    revision: str | None = flag(None, "with OWNER/NAME: a commit, branch or tag; default: main", "NAME")
    base: str | None = flag(
        None,
        "base model of the adapter; default: the local folder in adapter_config.json. With --to: the name to write; "
        "default: the model from which the run started",
        "FOLDER",
    )
    workdir: str = flag("", "with --from: new work folder. With --to: work folder of the run to export", "FOLDER")
    to: str | None = flag(None, "new folder of the Hugging Face model, local or gs://", "FOLDER")
    step: int | None = flag(None, "the step to export; default: the newest", "N", least=0)
    adapter: bool = flag(
        False, "with --from: keep the adapter separate from the weights; with --to: export only the adapters"
    )
    ema: bool = flag(False, "export the exponential moving average of the weights")
    dtype: Format | None = flag(
        None, "dtype of the exported tensors: bfloat16 or float32; default for adapters: float32", "bfloat16"
    )
    shard_bytes: int | None = flag(None, "maximum bytes of tensors per file", "5e9", read=bytes_of)
    push: str | None = flag(None, "push the finished folder to the Hub; a new repository is private", "OWNER/NAME")


def convert(options: ConvertOptions, say: Say = silent, progress: MakeProgress = no_progress) -> dict[str, Any]:
    """Imports or exports a Hugging Face model, like `jaxscale convert`. Resumes an interrupted conversion.

    progress: function that receives the name of a part, and returns a function to report the progress of that part.
    """
    if (options.from_ is None) == (options.to is None):
        raise BadInput("convert needs either --from=FOLDER, to import a model, or --to=FOLDER, to export one")
    if not options.workdir:
        raise BadInput("convert needs --workdir=FOLDER, the work folder; see jaxscale convert --help")
    if options.to is not None:
        return export_model(options.to, options, say, progress)
    if wrong := [name for name in EXPORT_ONLY if getattr(options, name) not in (None, False)]:
        raise BadInput(f"--{wrong[0]} applies only to exports (--to); remove it")
    assert options.from_ is not None, "checked above, with to"
    return import_model(options.from_, options, say, progress)


def import_model(source: str, flags: ConvertOptions, say: Say, progress: MakeProgress) -> dict[str, Any]:
    """Converts a Hugging Face folder to a work folder. Returns a record of the import."""
    workdir = flags.workdir
    model = hub.fetch(source, flags.revision, "--from")
    base = hub.fetch(flags.base, None, "--base") if flags.base else None
    found = open_source_model(model.folder if model else source, base.folder if base else flags.base, flags.adapter)
    fetched = next((one for one in (model, base) if one and one.folder == found.name), None)
    cfg, files = found.cfg, found.files
    folder, journal = prepare_workdir(workdir, found.identity)
    config = run_config(found, folder)
    made = {"from": fetched.name if fetched else found.name, "model_type": found.family.model_type}
    made |= {"kept": found.passthrough, "left_out": found.left_out}
    made |= {"revision": fetched.revision} if fetched else {}
    made |= {"identity": found.identity} | ({"adapter": found.adapter} if found.adapter else {})
    if generation := tokenizer_files.read_object(files.get(tokenizer_files.GENERATION, b"")):
        made["generation"] = generation
    run = {"config": schema.to_dict(config), "step": 0, "data": None, "ancestry": [], "converted": made, **run_info()}
    run = redacted(run)
    stop_if_unwritable(lambda: tokenizer_files.save_to_workdir(files, folder), folder)
    stop_if_unwritable(lambda: paths.write_json(folder / "config.json", run), folder)
    done = import_tensors(folder, journal, found.pairs, found.tensors, run, progress("convert"))
    for note in found.notes:
        say(f"{found.name}: {note}")
    if not_finite := done["not_finite"]:
        say(f"WARNING: {', '.join(not_finite[:3])} of {found.name} contains NaN or infinity")
    if not tokenizer_files.main_file(files):
        say(f"no tokenizer was imported: {tokenizer_files.missing_tokenizer(files, paths.as_path(found.name))}")
    record = {"workdir": workdir, "model_type": found.family.model_type, "num_params": cfg.num_params, "config": made}
    return record | done


def run_config(found: SourceModel, folder: Any) -> RunConfig:
    """Returns the config of the work folder, with only the model and its tokenizer set."""
    longest = found.cfg.max_seq_len or found.passthrough.get("max_position_embeddings") or MAX_SEQ_LEN
    seq_len = max(2, min(int(longest), MAX_SEQ_LEN))
    main = tokenizer_files.main_file(found.files)
    tokenizer_folder = folder / tokenizer_files.FOLDER
    data = {"tokenizer": os.fspath(tokenizer_folder / tokenizer_files.workdir_name(main)) if main else ""}
    return RunConfig(
        model=found.cfg,
        lora=found.lora,
        seq_len=seq_len,
        batch_tokens=seq_len,
        train_tokens=seq_len,
        data=schema.from_dict(DataConfig, data),
    )


def export_model(to: str, flags: ConvertOptions, say: Say, progress: MakeProgress) -> dict[str, Any]:
    """Exports a step: its weights as a Hugging Face folder, or its adapters for PEFT. Returns a record."""
    adapter = flags.adapter
    if flags.base and not adapter:
        raise BadInput("--base applies only to adapters; also set --adapter, or remove --base")
    if flags.revision:
        raise BadInput("--revision applies only to imports from the Hub (--from=OWNER/NAME); remove it")
    if adapter and flags.shard_bytes:
        raise BadInput("--shard_bytes does not apply to adapters, because PEFT reads a single file; remove it")
    dtype: Format = flags.dtype or ("float32" if adapter else "bfloat16")
    if dtype not in FORMATS:
        raise BadInput(f"--dtype={dtype} must be {units.or_list(FORMATS)}")
    if flags.push:
        hub.check_push(flags.push, to)
    workdir = paths.absolute(flags.workdir)
    checkpoints = Checkpoints(workdir / "checkpoints", CheckpointConfig())
    what = "ema" if flags.ema else "params"
    step, source = open_step(checkpoints, flags.step, what, adapter, flags.base)
    texts = tokenizer_files.export_files(workdir, source.run)
    config = source.adapter or hf_config(source, dtype, texts.end_ids)
    files = {name: text for name, text in texts.files.items() if not (adapter and name == tokenizer_files.GENERATION)}
    message = f"jaxscale: step {step}, {dtype}"
    done = export_step(
        source,
        to,
        dtype=dtype,
        shard_bytes=int(1e14) if adapter else flags.shard_bytes or SHARD_BYTES,
        texts=files,
        config=config,
        on_bytes=progress(f"step {step}"),
        send=lambda folder: hub.push_folder(folder, flags.push, message) if flags.push else "",
    )
    for note in texts.notes:
        say(note)
    record = {"to": to, "step": step, "dtype": dtype, "model_type": source.family.model_type}
    return record | done
