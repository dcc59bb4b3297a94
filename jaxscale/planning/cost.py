"""Time, money, energy, storage: one line of arithmetic each, with its units in the names."""

import math
from typing import NamedTuple

from jaxscale import units

HOUR, DAY, MONTH_HOURS = 3600.0, 86400.0, 730.0
GOODPUT = 0.90  # arXiv:2407.21783, section 3.3.4: more than 90% effective training time over 54 days
GOODPUT_SOURCE = "arXiv:2407.21783, section 3.3.4: more than 90% of the time on 16,384 H100"
# 419 unexpected interruptions in 54 days on 16,384 GPUs: arXiv:2407.21783, section 3.3.4 and table 5.
FAILURES_PER_CHIP_HOUR = 419 / (54 * 24 * 16_384)
FAILURES_SOURCE = "arXiv:2407.21783, table 5: 419 unexpected interruptions in 54 days on 16,384 H100"
PUE = {"tpu": 1.10, "gpu": 1.56, "cpu": 1.56}
PUE_SOURCE = {
    "tpu": "1.10, Google's data centres (cnbc.com, 2022-04-13)",
    "gpu": "1.56, the average of operators' largest sites (Uptime Institute's survey of 2024)",
    "cpu": "1.56, the average of operators' largest sites (Uptime Institute's survey of 2024)",
}
STORAGE_DOLLARS_PER_GB_MONTH = 0.020
STORAGE_SOURCE = "$0.020 a GB and month: cloud.google.com/storage/pricing, standard storage in us-central1"
SAVE_BYTES_PER_SECOND = 1e9  # of one host, assumed


class Range(NamedTuple):
    """The lower and the higher end of what may come."""

    low: float
    high: float

    def times(self, factor: float) -> "Range":
        """Both ends times a positive factor."""
        return Range(self.low * factor, self.high * factor)

    def under(self, dividend: float) -> "Range":
        """dividend / both ends, in rising order."""
        return Range(dividend / self.high, dividend / self.low)


def chips(number: float) -> str:
    """'1 chip', '128 chips', '0.5 chips'."""
    return f"{units.digits(number)} chip{'s' * (number != 1)}"


def flops_for_dollars(dollars: float, price: float, chip_peak_flops: float, mfu: float, goodput: float) -> float:
    """Operations of training that so many dollars buy."""
    return dollars / price * HOUR * chip_peak_flops * mfu * goodput


def megawatt_hours(watts: float, num_chips: float, wall_seconds: float, pue: float) -> float:
    """Energy of the chips at full load and of the building around them; hosts and network are left out."""
    return watts * num_chips * wall_seconds / HOUR * pue / 1e6


def mean_seconds_between_failures(num_chips: float) -> float:
    """Between interruptions of the whole run, each chip failing on its own."""
    return HOUR / (num_chips * FAILURES_PER_CHIP_HOUR)


def best_save_interval(save_seconds: float, between_failures: float) -> float:
    """Seconds between two checkpoints that lose the least: sqrt(2 x save x MTBF).

    Source: Young, CACM 17(9), 1974; Daly, Future Generation Computer Systems 22(3), 2006: the first order.
    """
    return math.sqrt(2 * save_seconds * between_failures)


def lost_share(interval: float, save_seconds: float, between_failures: float) -> float:
    """Part of the time that saving, and repeating half an interval at each failure, takes. First order."""
    return save_seconds / interval + interval / (2 * between_failures)


def kept_checkpoints(total_steps: int, save_every: int, keep_last: int, keep_every: int, keep_best: int) -> int:
    """Checkpoints that lie in storage at the end of a run."""
    made = max(1, math.ceil(total_steps / save_every) if save_every else 1)
    for_good = total_steps // keep_every if keep_every else 0
    return min(made, keep_last + for_good + keep_best)


def bytes_per_token_id(vocab_size: int) -> int:
    """2 where the largest id, vocab_size - 1, fits into uint16, else 4."""
    return 2 if vocab_size - 1 <= 65_535 else 4
