"""RunConfig, the settings of all packages, and checks that involve several packages."""

import dataclasses
from typing import ClassVar, Literal

from jaxscale import units
from jaxscale.core.config import EXPERT_LOSSES, ContextConfig, ExpertConfig, MeshConfig, PipelineConfig
from jaxscale.core.models import AnyModelConfig, names_of
from jaxscale.core.models.lora_mup_config import OPTIMIZERS, LoraConfig, MupConfig, lora_flops
from jaxscale.core.optim.config import STABLE, OptimConfig
from jaxscale.runtime.checkpoint.config import CheckpointConfig, ExportConfig, InitConfig, LockConfig
from jaxscale.runtime.data.config import DataConfig, mixture_names, mixture_stages
from jaxscale.runtime.data.objective_config import (
    MaskedLmConfig,
    RowLengths,
    SpanCorruptionConfig,
    Ul2Config,
    row_lengths,
)
from jaxscale.runtime.eval.config import EvalConfig, Evals, check_names
from jaxscale.runtime.hosts.config import HangConfig
from jaxscale.runtime.monitor.config import MonitorConfig
from jaxscale.runtime.sampling.config import SampleConfig
from jaxscale.runtime.training.config import LimitConfig, TrainConfig
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput
from jaxscale.units import divisors, or_list


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a run. After the run has begun, only shardings, the run length and reporting may change."""

    renamed: ClassVar[dict[str, str]] = {  # {old name: new name}, inner names first
        "train.ladder.rungs": "train.recovery.steps",
        "train.ladder": "train.recovery",
    }

    model: AnyModelConfig = setting(help="the model")
    seq_len: int = setting(1024, "tokens per row")
    batch_tokens: units.Tokens = setting(help="tokens per step, over all devices: an integer or '512 rows'")
    batch_ramp: tuple[tuple[units.Tokens, units.Tokens], ...] = setting(
        (),
        "smaller batches at the beginning: [(batch size, end), ...], such as [('8 rows', '10%')]; sizes are in tokens "
        "or rows, ends in tokens, rows or percent of the run; neither may be in steps",
    )
    seq_len_ramp: tuple[tuple[int, units.Tokens], ...] = setting(
        (),
        "shorter rows at the beginning: [(tokens per row, end), ...], such as [(256, '10%')]; each row of seq_len "
        "tokens is split into shorter rows, and the tokens per batch are unchanged",
    )
    train_tokens: units.Tokens = setting(
        help="tokens of the whole run: an integer, '20000 steps' or '1 epoch'", may_change=True
    )
    seed: int = setting(0, "seed of the initial parameters, the data order and all other random numbers")
    mesh: MeshConfig = setting(MeshConfig, may_change=True)
    context: ContextConfig = setting(ContextConfig, may_change=True, read_if="mesh.context!=1")
    expert: ExpertConfig = setting(ExpertConfig, may_change=True, read_if="mesh.expert!=1")
    pipeline: PipelineConfig = setting(PipelineConfig, may_change=True, read_if="mesh.pipeline!=1")
    rules: Literal["zero1", "zero2", "zero3"] = setting(
        "zero3",
        "arrays sharded over the fsdp axis: zero1: moments; zero2: also gradients; zero3: also parameters",
        may_change=True,
    )
    compiler: dict[str, bool | int | float | str] = setting(
        {}, "{XLA option: value}; overrides the default options (kernels/compiler_options.py)", may_change=True
    )
    optim: OptimConfig = setting(OptimConfig)
    train: TrainConfig = setting(TrainConfig)
    lora: LoraConfig = setting(LoraConfig, read_if="lora.rank")
    data: DataConfig = setting(DataConfig)
    eval: EvalConfig = setting(EvalConfig)
    evals: Evals = setting({}, "{name: evaluator} of more evaluations, each with a separate interval", may_change=True)
    checkpoint: CheckpointConfig = setting(CheckpointConfig)
    lock: LockConfig = setting(LockConfig, may_change=True)
    monitor: MonitorConfig = setting(MonitorConfig)
    sample: SampleConfig = setting(SampleConfig, read_if="sample.num_tokens")
    init: InitConfig = setting(InitConfig, read_if="init.from_path")
    hang: HangConfig = setting(HangConfig)
    export: ExportConfig = setting(ExportConfig, read_if="export.every_steps")
    limit: LimitConfig = setting(LimitConfig, may_change=True)

    def __post_init__(self):
        for check in CHECKS:
            check(self)

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens per step."""
        return units.resolve("batch_tokens", self.batch_tokens, seq_len=self.seq_len)

    @property
    def rows_per_step(self) -> int:
        """Number of rows per batch, over all devices."""
        return self.tokens_per_step // self.seq_len

    @property
    def ramp_tokens(self) -> tuple[int, ...]:
        """Batch sizes of batch_ramp in tokens."""
        return tuple(units.resolve("batch_ramp", size, seq_len=self.seq_len) for size, _ in self.batch_ramp)

    def with_batch(self, tokens: int, row_tokens: int | None = None, batch_shards: int = 1) -> "RunConfig":
        """Returns the config with one batch size and one sequence length, for a stage of batch_ramp and seq_len_ramp.

        Selects the smallest number of microbatches for which a microbatch is not larger than in the full batch and, if
        possible, its sequences divide evenly among batch_shards.
        """
        row_tokens, full = row_tokens or self.seq_len, self.tokens_per_step // self.train.num_microbatches
        parts = [number for number in divisors(tokens // self.seq_len) if number * full >= tokens]
        even = [number for number in parts if tokens // row_tokens // number % batch_shards == 0]
        train = dataclasses.replace(self.train, num_microbatches=(even or parts)[0])
        sizes = dict(seq_len=row_tokens, seq_len_ramp=(), batch_tokens=tokens, batch_ramp=())
        return dataclasses.replace(self, **sizes, train=train)

    @property
    def row_lengths(self) -> RowLengths:
        """Lengths of the sequences that the model reads. The objective makes them from sequences of seq_len tokens."""
        return row_lengths(self.data.objective, self.seq_len)

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of a training step per token of text, without recomputation."""
        rows = self.row_lengths
        flops = self.model.flops_per_token(rows.row, rows.encoder) * rows.row / self.seq_len
        return flops + lora_flops(self.model, self.lora) if self.lora.on else flops


def check_row_length(cfg: RunConfig) -> None:
    """Raises BadInput for sequences of one token, and for sequences longer than model.max_seq_len."""
    if cfg.seq_len < 2:
        raise BadInput(f"seq_len={cfg.seq_len} must be at least 2")
    longest = cfg.model.max_seq_len
    if longest and cfg.row_lengths.row > longest:
        made = "" if cfg.row_lengths.row == cfg.seq_len else f", which makes sequences of {cfg.row_lengths.row} tokens,"
        if getattr(cfg.model, "rope_scaling", None) is not None:
            raise BadInput(
                f"seq_len={cfg.seq_len}{made} is longer than the {longest} tokens that model.rope_scaling supports; "
                f"set model.rope_scaling.row_len={cfg.row_lengths.row}"
            )
        raise BadInput(
            f"seq_len={cfg.seq_len}{made} is longer than model.max_seq_len={longest}; increase model.max_seq_len"
        )


def check_batch(cfg: RunConfig) -> None:
    """Raises BadInput unless batches and microbatches consist of whole rows."""
    rows, remainder = divmod(cfg.tokens_per_step, cfg.seq_len)
    if remainder or not rows:
        nearest = max(1, round(cfg.tokens_per_step / cfg.seq_len)) * cfg.seq_len
        raise BadInput(
            f"batch_tokens={cfg.batch_tokens} must be a multiple of seq_len={cfg.seq_len}, such as {nearest}"
        )
    if rows % cfg.train.num_microbatches:
        raise BadInput(
            f"train.num_microbatches={cfg.train.num_microbatches} does not divide the {rows} sequences of a batch; "
            f"use {or_list(divisors(rows))}"
        )


def check_ramp(cfg: RunConfig) -> None:
    """Raises BadInput unless the sizes of batch_ramp are multiples of seq_len and increase up to batch_tokens."""
    sizes = cfg.ramp_tokens
    for before, size in zip((0, *sizes), (*sizes, cfg.tokens_per_step)):
        if size <= before:
            raise BadInput(
                f"batch_ramp has batches of {', '.join(map(str, sizes))} tokens, followed by batch_tokens="
                f"{cfg.tokens_per_step}; each must be larger than the previous one"
            )
    for size in sizes:
        if size % cfg.seq_len:
            raise BadInput(
                f"batch_ramp: the batch size of {size} tokens must be a multiple of seq_len={cfg.seq_len}, such as "
                f"{-(-size // cfg.seq_len) * cfg.seq_len}"
            )


def check_seq_len_ramp(cfg: RunConfig) -> None:
    """Raises BadInput unless seq_len_ramp increases, its lengths divide seq_len, and splitting is allowed."""
    lengths = [length for length, _ in cfg.seq_len_ramp]
    for before, length in zip((1, *lengths), (*lengths, cfg.seq_len) if lengths else ()):
        if length <= before:
            raise BadInput(
                f"seq_len_ramp has rows of {', '.join(map(str, lengths))} tokens, followed by seq_len="
                f"{cfg.seq_len}; each must be at least 2, and longer than the previous one"
            )
    for length in lengths:
        if cfg.seq_len % length:
            fitting = [part for part in divisors(cfg.seq_len) if 1 < part < cfg.seq_len]
            raise BadInput(f"seq_len_ramp: seq_len={cfg.seq_len} is not a multiple of {length}; use {or_list(fitting)}")
    if lengths and cfg.data.objective.name != "next_token":
        raise BadInput(
            f"seq_len_ramp splits sequences, but data.objective.name={cfg.data.objective.name!r} needs them whole; "
            "remove seq_len_ramp, or set data.objective.name to 'next_token'"
        )
    if lengths and cfg.data.name == "chat":
        raise BadInput(
            "seq_len_ramp would split the conversations of data.name='chat' and separate answers from questions; "
            "remove seq_len_ramp"
        )


def check_amounts(cfg: RunConfig) -> None:
    """Raises BadInput for an amount with an unknown unit, or in steps with batch_ramp. See resolve_budget()."""
    optim = cfg.optim
    units.parse("optim.warmup_tokens", optim.warmup_tokens)
    amounts = [("train_tokens", cfg.train_tokens)]
    amounts += [("batch_ramp", until) for _, until in cfg.batch_ramp]
    amounts += [("seq_len_ramp", until) for _, until in cfg.seq_len_ramp]
    if cfg.batch_ramp and cfg.data.mixture:
        amounts += [("data.mixture's start", start) for start, _ in mixture_stages(cfg.data.mixture)]
    if optim.decay_tokens is not None:
        amounts.append(("optim.decay_tokens", optim.decay_tokens))
    if optim.decay == "piecewise":
        amounts += [("optim.factors", when) for when, _ in optim.parse_factors()]
    for name, amount in amounts:
        if units.parse(name, amount)[1] == "steps" and cfg.batch_ramp:
            raise BadInput(
                f"{name}={amount!r} is in steps, but steps differ in size with batch_ramp; give it in tokens or rows"
            )


def check_objective(cfg: RunConfig) -> None:
    """Raises BadInput for a model that does not support data.objective."""
    objective, model = cfg.data.objective, cfg.model
    needed, way_out = "decoder", f"a decoder: {or_list(names_of('decoder'))}"
    if isinstance(objective, MaskedLmConfig):
        needed, way_out = "encoder", f"model.name={or_list([repr(name) for name in names_of('encoder')])}"
    if isinstance(objective, (SpanCorruptionConfig, Ul2Config)):
        both = or_list([repr(name) for name in names_of("encoder_decoder")])
        if objective.layout == "encoder_decoder":
            needed, way_out = "encoder_decoder", f"model.name={both}, or data.objective.layout='one_row' with a decoder"
        else:
            way_out += f", or data.objective.layout='encoder_decoder' with model.name={both}"
    if model.kind != needed:
        raise BadInput(f"data.objective.name={objective.name!r} cannot train model.name={model.name!r}; use {way_out}")
    if cfg.row_lengths.prefix and model.attention_window is not None:
        raise BadInput(
            f"data.objective.name={objective.name!r} needs attention to the whole prefix of a document, but "
            f"model.attention_window={model.attention_window} limits attention to a window; set it to none"
        )


def check_clean_source(cfg: RunConfig) -> None:
    """Raises BadInput for a train.recovery.clean_source that data.mixture does not have."""
    source, names = cfg.train.recovery.clean_source, mixture_names(cfg.data.mixture)
    if source is not None and source not in names:
        raise BadInput(
            f"train.recovery.clean_source={source!r} is not a source of data.mixture, which has {or_list(names)}"
        )


def check_weights(cfg: RunConfig) -> None:
    """Raises BadInput if the EMA, the export or the adapters cannot be combined with other settings."""
    if cfg.train.ema.on and cfg.optim.offload_params:
        raise BadInput(
            "train.ema.decay and optim.offload_params cannot be combined, because the EMA is updated on the device, "
            "but the parameters are in host memory; disable one of them"
        )
    if cfg.sample.ema and not cfg.train.ema.on:
        raise BadInput("sample.ema=true needs an EMA of the weights; set train.ema.decay above 0")
    every, saved = cfg.export.every_steps, cfg.checkpoint.save_every_steps
    if every and (not saved or every % saved):
        raise BadInput(
            f"export.every_steps={every} must be a multiple of checkpoint.save_every_steps={saved}, because exports "
            "are made from checkpoints"
        )
    if every and cfg.lora.on:
        raise BadInput(
            f"export.every_steps={every} would export weights without adapters (lora.rank={cfg.lora.rank}); set "
            "export.every_steps to 0, and merge the adapters after the run with jaxscale ckpt merge_lora"
        )
    if every and cfg.export.ema and not cfg.train.ema.on:
        raise BadInput("export.ema=true needs an EMA of the weights; set train.ema.decay above 0")
    if cfg.lora.on and cfg.model.kind != "decoder":
        decoders = " or ".join(names_of("decoder"))
        raise BadInput(
            f"lora.rank={cfg.lora.rank}: model.name={cfg.model.name!r} does not support adapters; use {decoders}"
        )
    if cfg.lora.on and cfg.optim.offload_params:
        raise BadInput("lora.rank and optim.offload_params cannot be combined; remove one of them")


def check_limit(cfg: RunConfig) -> None:
    """Raises BadInput for limit.on_overrun='decay' if the schedule has no constant phase."""
    optim, limit = cfg.optim, cfg.limit
    if not limit.on or limit.on_overrun != "decay":
        return
    if optim.decay not in STABLE:
        raise BadInput(
            f"limit.on_overrun='decay' starts the decay early, but optim.decay={optim.decay!r} has no constant phase "
            "before a decay; set optim.decay to wsd or constant, or limit.on_overrun to 'tell'"
        )
    if not 0 <= optim.min_lr <= optim.peak_lr:
        raise BadInput(f"optim.min_lr={optim.min_lr:g} must be between 0 and optim.peak_lr={optim.peak_lr:g}")


def check_evals(cfg: RunConfig) -> None:
    """Raises BadInput for an invalid name of an evaluator, and for evaluators with a model that is not a decoder."""
    check_names(cfg.evals)
    if cfg.evals and cfg.model.kind != "decoder":
        decoders = or_list(names_of("decoder"))
        raise BadInput(f"evals need a decoder, but model.name={cfg.model.name!r} is not a decoder; use {decoders}")


def check_experts(cfg: RunConfig) -> None:
    """Raises BadInput for MoE settings of a dense model, and for settings that MoE models do not support."""
    experts, model = getattr(cfg.model, "experts", None), cfg.model
    if experts is None and cfg.mesh.expert != 1:
        raise BadInput(f"mesh.expert={cfg.mesh.expert} needs a model with experts; increase another axis instead")
    if experts is None:
        if lost := [name for name in cfg.train.aux_losses if name in EXPERT_LOSSES]:
            raise BadInput(f"train.aux_losses has {lost[0]!r}, but this model has no experts; remove it")
        if cfg.init.experts != "none":
            raise BadInput(f"init.experts={cfg.init.experts!r} needs a model with experts; set model.experts")
    elif model.matmul_dtype != "none":
        raise BadInput(
            f"model.matmul_dtype={model.matmul_dtype!r} does not support model.experts; set it to 'none', so "
            "that matmuls use model.compute_dtype"
        )


def check_qk_clip(cfg: RunConfig) -> None:
    """Raises BadInput for settings that optim.qk_clip does not support."""
    model, optim = cfg.model, cfg.optim
    if optim.qk_clip is None:
        return
    reasons = {
        f"model.name={model.name!r}, which is not a decoder": model.kind != "decoder",
        "model.qk_norm=true, which normalizes queries and keys for any weights": getattr(model, "qk_norm", False),
        f"lora.rank={cfg.lora.rank}, which freezes the weights that qk_clip scales": cfg.lora.on,
        "optim.offload_params=true, with which updated weights are not on the device": optim.offload_params,
        "optim.groups with frozen=true, whose weights qk_clip would scale": any(one.frozen for one in optim.groups),
        f"mesh.pipeline={cfg.mesh.pipeline}, whose stages do not record attention scores": cfg.mesh.pipeline != 1,
    }
    for what, is_so in reasons.items():
        if is_so:
            raise BadInput(f"optim.qk_clip={optim.qk_clip:g} cannot be combined with {what}; remove one of them")


def check_scales(cfg: RunConfig) -> None:
    """Raises BadInput for settings for which muP has no rule."""
    mup: MupConfig | None = getattr(cfg.model, "mup", None)
    if mup is None:
        return
    if cfg.optim.name not in OPTIMIZERS:
        raise BadInput(
            f"model.mup does not support optim.name={cfg.optim.name!r}; use {or_list(OPTIMIZERS)}, or remove model.mup"
        )
    if cfg.optim.name == "sgd" and mup.base_layers is not None:
        raise BadInput("model.mup.base_layers applies only to AdamW, but optim.name='sgd'; remove base_layers")
    if cfg.lora.on:
        raise BadInput(
            "lora.rank cannot be combined with model.mup, which has no rule for adapters; export the model with "
            "jaxscale convert, import it again without muP, and train adapters for the imported model"
        )


# Checks that involve settings of several packages, run when a RunConfig is made. Checks of a single group are in its
# __post_init__, checks that need devices in program/device_checks.py, checks that need files in
# runtime.data.checks.check_data, and checks that depend on the work folder in runtime.run.start.resolve_start.
CHECKS = (
    check_experts, check_row_length, check_objective, check_clean_source, check_weights, check_evals, check_batch,
    check_ramp, check_seq_len_ramp, check_amounts, check_scales, check_limit, check_qk_clip,
)  # fmt: skip
