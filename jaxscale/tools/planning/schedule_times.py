"""Idle times of pipeline schedules, in closed form and by simulation of each tick."""

import numpy as np

from jaxscale.core.axes.pipeline_schedules import EQUAL_COSTS, IDLE, Costs, Schedule, ScheduleSize


def pass_seconds(schedule: Schedule, costs: Costs) -> np.ndarray:
    """Returns the time of each stage in each tick as float[ticks, stages]."""
    forward, backward = (passes.microbatch != IDLE for passes in (schedule.forward, schedule.backward))
    weights = backward & ~schedule.inputs_only
    return forward * costs.forward + backward * (costs.recompute + costs.input_grads) + weights * costs.weight_grads


def simulated_seconds(schedule: Schedule, costs: Costs = EQUAL_COSTS, head: float = 0.0) -> float:
    """Returns the time of a step, summing each tick's slowest stage. head: time of the loss per microbatch."""
    return float(pass_seconds(schedule, costs).max(axis=1).sum()) + schedule.num_microbatches * head


def bubble_fraction(schedule: Schedule, costs: Costs) -> float:
    """Returns the fraction of the simulated time in which a stage is idle or recomputes, excluding the loss."""
    return 1 - schedule.num_microbatches * schedule.num_chunks * sum(costs) / simulated_seconds(schedule, costs)


def recomputed_time(schedule: ScheduleSize, costs: Costs) -> float:
    """Returns the last stage's time for recomputing deferred passes, relative to the time of all other passes."""
    return schedule.num_deferred * (costs.recompute + costs.input_grads) / (schedule.chunk_runs * sum(costs))


def idle_time(schedule: ScheduleSize, costs: Costs) -> float:
    """Returns the last stage's idle time relative to its busy time, which includes recomputation."""
    recomputed = recomputed_time(schedule, costs)
    return (schedule.slowdown(costs) - 1 - recomputed) / (1 + recomputed)


def bubble_formula(schedule: ScheduleSize) -> str:
    """Returns text such as '5.2% = (P-1)/(VM+P-1) = 7/135'."""
    idle, chunk_runs = schedule.num_stages - 1, schedule.chunk_runs
    if schedule.name == "zero_bubble":
        ratio = f"{3 * idle}/{4 * chunk_runs + 3 * idle} (recomputation included)"
        return f"{schedule.bubble:.1%} = 3(P-1)/(4VM+3(P-1)) = {ratio}"
    return f"{schedule.bubble:.1%} = (P-1)/(VM+P-1) = {idle}/{chunk_runs + idle}"
