"""Where a device's memory goes, each kind with the formula that says so."""

import dataclasses

from jaxscale import units
from jaxscale.build import Program
from jaxscale.models.config import lora_params
from jaxscale.planning.memory import MemoryNeed, memory_need, shard_bytes
from jaxscale.planning.tables import MemoryRow

OPTIMIZER_MOMENTS = {"adamw": "2 moments", "lion": "1 moment", "sgd": "momentum"}


def memory_rows(program: Program, need: MemoryNeed) -> tuple[MemoryRow, ...]:
    """Memory of one device by kind. The state is counted from the shardings that training uses."""
    cfg = program.cfg
    count = units.count(cfg.model.num_params)
    learned = units.count(lora_params(cfg.model, cfg.lora)) if cfg.lora.on else count
    shape = dict(program.mesh.shape)
    tensor, both = shape["tensor"], shape["fsdp"] * shape["tensor"]
    over = {"zero1": (tensor, both), "zero2": (tensor, both), "zero3": (both, both)}[cfg.rules]
    share = lambda parts: f" / {parts}" if parts > 1 else ""
    moments, average = shard_bytes(program.abstract_state.opt_state), shard_bytes(program.abstract_state.ema)
    rows = [
        MemoryRow("parameters", need.params, f"4 B x {count}{share(over[0])}"),
        MemoryRow("moments", moments, f"{OPTIMIZER_MOMENTS[cfg.optim.name]} x 4 B x {learned}{share(over[1])}"),
        MemoryRow("gradients", need.grads, f"4 B x {learned}{share(over[0])}, at most"),
    ]
    if average:
        rows.insert(2, MemoryRow("average of parameters", average, f"4 B x {learned}{share(over[1])}"))
    if need.summed:
        rows.append(MemoryRow("gradients summed so far", need.summed, f"4 B x {learned}{share(both)}: microbatches"))
    if need.padding:
        rows.append(MemoryRow("padding", need.padding, "of the above, to a TPU's tiles of 8 x 128 numbers"))
    made = cfg.rows_per_step // cfg.train.num_microbatches // program.batch_shards
    remat = f"remat={cfg.model.remat}"
    rows.append(
        MemoryRow(
            "activations",
            need.activations,
            f"{units.plural(made, 'row')} of {cfg.row_lengths.row:,} tokens, {remat}: estimate",
        )
    )
    return tuple(rows)


def fitting_parts(program: Program, usable: int) -> int | None:
    """The fewest microbatches with which the estimate fits into so many bytes; None if none does."""
    cfg = program.cfg
    for parts in units.divisors(cfg.rows_per_step):
        if cfg.rows_per_step // parts % program.batch_shards:
            continue
        train = dataclasses.replace(cfg.train, num_microbatches=parts)
        wanted = dataclasses.replace(program, cfg=dataclasses.replace(cfg, train=train))
        if memory_need(wanted).total <= usable:
            return parts
    return None
