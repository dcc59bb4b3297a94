"""Faults on purpose, for tests and rehearsals. Unset, these variables change nothing; no other file reads them.

JAXSCALE_CRASH_AT=POINT:N            kills this process (SIGKILL) when POINT is passed for the N-th time
JAXSCALE_HANG_AT=PHASE:N             never returns from PHASE when it begins for the N-th time
JAXSCALE_TERM_AT=PHASE:N             gets SIGTERM in PHASE when it begins for the N-th time
JAXSCALE_SPOIL_BATCHES=A:B:KIND      batches [A, B) weigh NaN (nan) or hold random tokens (noise)
JAXSCALE_SPOIL_GRADIENT=STEP:LEAF    the gradient of LEAF is NaN at STEP, whatever the batch
JAXSCALE_FLIP_BIT=STEP:DEVICE:TIMES  one bit of a parameter is another one on DEVICE before STEP (counted from 0), the
                                     first TIMES (1) that this step is run
JAXSCALE_ONLY_PROCESS=I              all of these in process I alone
"""

import collections
import os
import signal
import sys
import threading
import time
from typing import NamedTuple

passed: collections.Counter[str] = collections.Counter()
lock = threading.Lock()


class SpoiltBatches(NamedTuple):
    """Batches [start, stop) are spoilt: 'nan' or 'noise'."""

    start: int
    stop: int
    kind: str


class SpoiltGradient(NamedTuple):
    """The gradient of a leaf at a step."""

    step: int
    leaf: str


class FlippedBit(NamedTuple):
    """A bit of a parameter, before a step, on one device, the first `times` that the step is run."""

    step: int
    device: int
    times: int = 1


def crash_point(name: str) -> None:
    """Dies here, as by a power cut, if JAXSCALE_CRASH_AT asks for it."""
    if reached("JAXSCALE_CRASH_AT", name):
        os.kill(os.getpid(), signal.SIGKILL)


def hang_point(phase: str) -> None:
    """Never returns if JAXSCALE_HANG_AT asks for it; or goes on with a SIGTERM, if JAXSCALE_TERM_AT does."""
    if reached("JAXSCALE_TERM_AT", phase):
        os.kill(os.getpid(), signal.SIGTERM)
    while reached("JAXSCALE_HANG_AT", phase):
        while True:
            time.sleep(3600)


def reached(variable: str, name: str) -> bool:
    """True when the named place is passed for the N-th time, and never where the variable names another."""
    wanted, _, number = chosen(variable).partition(":")
    if wanted != name:
        return False
    with lock:
        passed[variable] += 1
        return passed[variable] == int(number or 1)


def spoilt_batches() -> SpoiltBatches | None:
    """Which batches are to be spoilt."""
    text = chosen("JAXSCALE_SPOIL_BATCHES")
    if not text:
        return None
    start, stop, kind = text.split(":")
    return SpoiltBatches(int(start), int(stop), kind)


def spoilt_gradient() -> SpoiltGradient | None:
    """Which gradient is to be spoilt."""
    step, _, leaf = chosen("JAXSCALE_SPOIL_GRADIENT").partition(":")
    return SpoiltGradient(int(step), leaf) if leaf else None


def flipped_bit() -> FlippedBit | None:
    """Which device is to compute with a wrong bit."""
    text = chosen("JAXSCALE_FLIP_BIT")
    return FlippedBit(*map(int, text.split(":"))) if text else None


def device_to_spoil(step: int) -> int | None:
    """The device that is to begin this step with a wrong bit, this time."""
    fault = flipped_bit()
    if fault is None or fault.step != step:
        return None
    with lock:
        passed["JAXSCALE_FLIP_BIT"] += 1
        return fault.device if passed["JAXSCALE_FLIP_BIT"] <= fault.times else None


def chosen(variable: str) -> str:
    """The variable's value in a process that it is meant for, else ''."""
    value = os.environ.get(variable, "")
    if value and (only := os.environ.get("JAXSCALE_ONLY_PROCESS")):
        number = sys.modules["jax"].process_index() if "jax" in sys.modules else 0  # this room imports nothing heavy
        return value if number == int(only) else ""
    return value
