"""Times of a pipeline schedule's tables, tick by tick. ScheduleSize has the same in closed form."""

import numpy as np

from jaxscale.core.axes.pipeline_schedules import EQUAL_COSTS, IDLE, Costs, Schedule


def pass_seconds(schedule: Schedule, costs: Costs) -> np.ndarray:
    """Returns float[t, P], the time of each stage in each tick."""
    forward, backward = (passes.microbatch != IDLE for passes in (schedule.forward, schedule.backward))
    weights = backward & ~schedule.inputs_only
    return forward * costs.forward + backward * (costs.recompute + costs.input_grads) + weights * costs.weight_grads


def simulated_seconds(schedule: Schedule, costs: Costs = EQUAL_COSTS, head: float = 0.0) -> float:
    """Returns the time of a step, in the unit of costs: each tick takes as long as its busiest stage.

    head: time of the loss of one microbatch.
    """
    return float(pass_seconds(schedule, costs).max(axis=1).sum()) + schedule.num_microbatches * head


def bubble_fraction(schedule: Schedule, costs: Costs) -> float:
    """Returns the simulated share of the time beyond running each pass of a stage once; the head is left out."""
    return 1 - schedule.num_microbatches * schedule.num_chunks * sum(costs) / simulated_seconds(schedule, costs)
