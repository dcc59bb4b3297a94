"""Fault injection for tests and rehearsals, by environment variables that only this file reads.

JAXSCALE_CRASH_AT=POINT:N            kills this process (SIGKILL) when POINT is reached for the N-th time
JAXSCALE_HANG_AT=PHASE:N             hangs in PHASE when it begins for the N-th time
JAXSCALE_TERM_AT=PHASE:N             sends SIGTERM to this process when PHASE begins for the N-th time
JAXSCALE_SPOIL_BATCHES=A:B:KIND      batches [A, B) have loss weights NaN (nan) or random tokens (noise)
JAXSCALE_SPOIL_GRADIENT=STEP:LEAF    the gradient of LEAF is NaN at STEP
JAXSCALE_FLIP_BIT=STEP:DEVICE:TIMES  flips a bit of a parameter on DEVICE before STEP (counted from 0), the first TIMES
                                     (default 1) times that this step is run
JAXSCALE_ONLY_PROCESS=I              restricts all of these to process I
"""

import collections
import os
import signal
import sys
import threading
import time

passed: collections.Counter[str] = collections.Counter()
lock = threading.Lock()


def crash_point(name: str) -> None:
    """Kills the process if JAXSCALE_CRASH_AT selects this point."""
    if reached("JAXSCALE_CRASH_AT", name):
        os.kill(os.getpid(), signal.SIGKILL)


def hang_point(phase: str) -> None:
    """Hangs, or sends SIGTERM to this process, if JAXSCALE_HANG_AT or JAXSCALE_TERM_AT selects this phase."""
    if reached("JAXSCALE_TERM_AT", phase):
        os.kill(os.getpid(), signal.SIGTERM)
    while reached("JAXSCALE_HANG_AT", phase):
        while True:
            time.sleep(3600)


def reached(variable: str, name: str) -> bool:
    """Returns True if the value of the variable is NAME:N and this is the N-th call for `name`."""
    point, _, number = read_variable(variable).partition(":")
    if point != name:
        return False
    with lock:
        passed[variable] += 1
        return passed[variable] == int(number or 1)


def corrupt_batches() -> tuple[int, int, str] | None:
    """Returns (start, stop, 'nan' or 'noise') of the batches to corrupt, or None."""
    text = read_variable("JAXSCALE_SPOIL_BATCHES")
    if not text:
        return None
    start, stop, kind = text.split(":")
    return int(start), int(stop), kind


def corrupt_gradient() -> tuple[int, str] | None:
    """Returns (step, leaf) of the gradient to corrupt, or None."""
    step, _, leaf = read_variable("JAXSCALE_SPOIL_GRADIENT").partition(":")
    return (int(step), leaf) if leaf else None


def flipped_bit() -> tuple[int, int, int] | None:
    """Returns (step, device, times) of the bit flip to inject, or None."""
    text = read_variable("JAXSCALE_FLIP_BIT")
    if not text:
        return None
    step, device, times, *_ = map(int, f"{text}:1".split(":"))
    return step, device, times


def bit_flip_device(step: int) -> int | None:
    """Returns the device on which to flip a bit before this execution of `step`, or None."""
    fault = flipped_bit()
    if fault is None or fault[0] != step:
        return None
    with lock:
        passed["JAXSCALE_FLIP_BIT"] += 1
        return fault[1] if passed["JAXSCALE_FLIP_BIT"] <= fault[2] else None


def read_variable(variable: str) -> str:
    """Returns the variable's value in the processes that JAXSCALE_ONLY_PROCESS selects, or ''."""
    value = os.environ.get(variable, "")
    if value and (only := os.environ.get("JAXSCALE_ONLY_PROCESS")):
        number = sys.modules["jax"].process_index() if "jax" in sys.modules else 0  # importing jax here is too slow
        return value if number == int(only) else ""
    return value
