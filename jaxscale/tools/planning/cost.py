"""Formulas for the time, money, energy and storage of a run."""

import math
from typing import NamedTuple

from jaxscale import units

HOUR, DAY = 3600.0, 86400.0
GOODPUT = 0.90  # arXiv:2407.21783, section 3.3.4: more than 90% effective training time over 54 days
GOODPUT_SOURCE = "arXiv:2407.21783, section 3.3.4: more than 90% of the time on 16,384 H100"
# 419 unexpected interruptions in 54 days on 16,384 GPUs: arXiv:2407.21783, section 3.3.4 and table 5.
FAILURES_PER_CHIP_HOUR = 419 / (54 * 24 * 16_384)
FAILURES_SOURCE = "arXiv:2407.21783, table 5: 419 unexpected interruptions in 54 days on 16,384 H100"
LARGE_SITES = 1.56, "1.56, the average of operators' largest sites (Uptime Institute's survey of 2024)"
PUE = {"tpu": (1.10, "1.10, Google's data centers (cnbc.com, 2022-04-13)"), "gpu": LARGE_SITES, "cpu": LARGE_SITES}
STORAGE_DOLLARS_PER_GB_MONTH = 0.020
STORAGE_SOURCE = "$0.020 per GB and month: cloud.google.com/storage/pricing, standard storage in us-central1"
SAVE_BYTES_PER_SECOND = 1e9  # per host, assumed


class Range(NamedTuple):
    """Lower and upper bounds of an expected value."""

    low: float
    high: float

    def times(self, factor: float) -> "Range":
        """Returns the range scaled by a positive factor."""
        return Range(self.low * factor, self.high * factor)

    def divide(self, dividend: float) -> "Range":
        """Returns the range of `dividend` divided by a value in this range."""
        return Range(dividend / self.high, dividend / self.low)


def chips(number: float) -> str:
    """Returns text such as '1 chip', '128 chips' or '0.5 chips'."""
    return f"{units.digits(number)} chip{'s' * (number != 1)}"


def flops_for_dollars(dollars: float, price: float, chip_peak_flops: float, mfu: float, goodput: float) -> float:
    """Returns the training FLOPs that a budget buys."""
    return dollars / price * HOUR * chip_peak_flops * mfu * goodput


def megawatt_hours(watts: float, num_chips: float, wall_seconds: float, pue: float) -> float:
    """Returns the energy of the chips at full load, multiplied by PUE. Excludes hosts and network."""
    return watts * num_chips * wall_seconds / HOUR * pue / 1e6


def mean_seconds_between_failures(num_chips: float) -> float:
    """Returns the mean time between interruptions of the run, assuming independent chip failures."""
    return HOUR / (num_chips * FAILURES_PER_CHIP_HOUR)


def best_save_interval(save_seconds: float, between_failures: float) -> float:
    """Returns sqrt(2 x save time x MTBF) in seconds (Young, CACM 17(9), 1974; Daly, FGCS 22(3), 2006)."""
    return math.sqrt(2 * save_seconds * between_failures)


def lost_share(interval: float, save_seconds: float, between_failures: float) -> float:
    """Returns the fraction of time lost to saves, and to repeating half an interval after each failure."""
    return save_seconds / interval + interval / (2 * between_failures)


def num_checkpoints(total_steps: int, save_every: int, keep_last: int, keep_every: int, keep_best: int) -> int:
    """Returns the number of checkpoints that are stored at the end of a run."""
    num_saves = max(1, math.ceil(total_steps / save_every) if save_every else 1)
    permanent = total_steps // keep_every if keep_every else 0
    return min(num_saves, keep_last + permanent + keep_best)


def bytes_per_token_id(vocab_size: int) -> int:
    """Returns 2 if all token ids fit into uint16, else 4."""
    return 2 if vocab_size - 1 <= 65_535 else 4
