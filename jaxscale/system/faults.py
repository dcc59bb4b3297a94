"""Injected faults for tests and rehearsals, from these environment variables; no other file reads them.

JAXSCALE_CRASH_AT=POINT:N            kills this process (SIGKILL) when POINT is passed for the N-th time
JAXSCALE_HANG_AT=PHASE:N             never returns from PHASE when it begins for the N-th time
JAXSCALE_TERM_AT=PHASE:N             gets SIGTERM in PHASE when it begins for the N-th time
JAXSCALE_SPOIL_BATCHES=A:B:KIND      batches [A, B) have loss weights NaN (nan) or random tokens (noise)
JAXSCALE_SPOIL_GRADIENT=STEP:LEAF    the gradient of LEAF is NaN at STEP
JAXSCALE_FLIP_BIT=STEP:DEVICE:TIMES  flips a bit of a parameter on DEVICE before STEP (counted from 0), the first TIMES
                                     (1) that this step is run
JAXSCALE_ONLY_PROCESS=I              all of these in process I only
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


class CorruptBatches(NamedTuple):
    """Corrupts batches [start, stop) with 'nan' or 'noise'."""

    start: int
    stop: int
    kind: str


class CorruptGradient(NamedTuple):
    """Corrupts the gradient of a leaf at a step."""

    step: int
    leaf: str


class FlippedBit(NamedTuple):
    """Flips a bit of a parameter on one device before a step, the first `times` that the step is run."""

    step: int
    device: int
    times: int = 1


def crash_point(name: str) -> None:
    """Kills the process if JAXSCALE_CRASH_AT says so."""
    if reached("JAXSCALE_CRASH_AT", name):
        os.kill(os.getpid(), signal.SIGKILL)


def hang_point(phase: str) -> None:
    """Never returns if JAXSCALE_HANG_AT says so; sends SIGTERM to this process if JAXSCALE_TERM_AT does."""
    if reached("JAXSCALE_TERM_AT", phase):
        os.kill(os.getpid(), signal.SIGTERM)
    while reached("JAXSCALE_HANG_AT", phase):
        while True:
            time.sleep(3600)


def reached(variable: str, name: str) -> bool:
    """Returns True when the point that the variable names is passed for the N-th time."""
    point, _, number = read_variable(variable).partition(":")
    if point != name:
        return False
    with lock:
        passed[variable] += 1
        return passed[variable] == int(number or 1)


def corrupt_batches() -> CorruptBatches | None:
    """Returns the batches to corrupt."""
    text = read_variable("JAXSCALE_SPOIL_BATCHES")
    if not text:
        return None
    start, stop, kind = text.split(":")
    return CorruptBatches(int(start), int(stop), kind)


def corrupt_gradient() -> CorruptGradient | None:
    """Returns the gradient to corrupt."""
    step, _, leaf = read_variable("JAXSCALE_SPOIL_GRADIENT").partition(":")
    return CorruptGradient(int(step), leaf) if leaf else None


def flipped_bit() -> FlippedBit | None:
    """Returns the bit flip to inject."""
    text = read_variable("JAXSCALE_FLIP_BIT")
    return FlippedBit(*map(int, text.split(":"))) if text else None


def bit_flip_device(step: int) -> int | None:
    """Returns the device on which to flip a bit before this run of the step, or None."""
    fault = flipped_bit()
    if fault is None or fault.step != step:
        return None
    with lock:
        passed["JAXSCALE_FLIP_BIT"] += 1
        return fault.device if passed["JAXSCALE_FLIP_BIT"] <= fault.times else None


def read_variable(variable: str) -> str:
    """Returns the variable's value in a process selected by JAXSCALE_ONLY_PROCESS, else ''."""
    value = os.environ.get(variable, "")
    if value and (only := os.environ.get("JAXSCALE_ONLY_PROCESS")):
        number = sys.modules["jax"].process_index() if "jax" in sys.modules else 0  # jax is too heavy to import here
        return value if number == int(only) else ""
    return value
