"""Which step is taken where several are there and not all can be believed, and what is said of the others."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.checkpoint import folders, record, restore
from jaxscale.hosts.agree import agreed
from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop


def newest_to_read(checkpoints: Any, say: Callable[[str], None], before: int | None = None) -> int | None:
    """The newest step (below `before`) whose record can be believed, for those who only read; None if there is none.

    Nothing is moved, and what is passed over is said. For all processes.
    Raises: Stop (CHECKPOINT_CORRUPT) if there are steps, and no record can be believed.
    """
    steps = agreed(lambda: [step for step in checkpoints.all_steps() if before is None or step < before])
    newest = agreed(lambda: checkpoints.newest(before))
    if steps and newest is None:
        checkpoints.read_record(steps[-1])
    for step in steps:
        if step > newest:
            cause = why_not(checkpoints, step).removesuffix(checkpoints.way_out(step, newest))
            say(f"WARNING: {cause}; step {newest} is taken")
    return newest


def why_not(checkpoints: Any, step: int) -> str:
    """Why the record of a step cannot be believed; '' if it can. Raises Stop (STORAGE) where that may pass."""
    try:
        checkpoints.read_record(step)
    except Stop as error:
        if error.code != Exit.CHECKPOINT_CORRUPT:
            raise
        return str(error)
    return ""


def tell_lost(checkpoints: Any, say: Callable[[str], None]) -> None:
    """Says, in an event as well, if the last good step is gone, is another or lacks its commit mark, or is not known.

    In a bucket a step without its mark looks like a save that was killed, and would be removed: it is set aside.
    Raises Stop (CHECKPOINT_CORRUPT) where there is no other step: what is lost is not begun anew in silence.
    """
    directory = checkpoints.directory
    good = agreed(lambda: record.look_up_last_good(directory))
    if not good:
        return
    if isinstance(good, str):
        cause = f"{good}; which step was saved last is not known from it, and the next save writes it anew"
        checkpoints.note("alarm", None, cause=cause)
        return say(f"WARNING: {cause}")
    step, newest = good["step"], agreed(checkpoints.latest_step)
    if agreed(lambda: folders.is_committed(directory / str(step))):
        if why_not(checkpoints, step) or checkpoints.read_record(step)["sha256"] == good["sha256"]:
            return  # what cannot be believed is told when it is opened
        cause = (
            f"step {step} is not the one that was last saved here ({directory / record.LAST_GOOD}): was it copied in"
        )
        checkpoints.note("alarm", step, cause=f"{cause}?")
        return say(f"WARNING: {cause} from another run?")
    if newest is not None and agreed(lambda: was_set_aside(directory, good)):
        return
    cause = f"step {step}, the last that was saved whole ({directory / record.LAST_GOOD}), is not there any more"
    if paths.is_remote(directory) and agreed(lambda: (directory / str(step)).exists()):
        place = checkpoints.set_aside(step, "damaged")
        cause = f"step {step} was saved whole and has no {folders.COMMITTED} any more; it is now {place}"
    if newest is None:
        way_out = "bring one back from a copy, or name another --workdir"
        raise Stop(Exit.CHECKPOINT_CORRUPT, f"{cause}, and there is no other; {way_out}")
    checkpoints.note("alarm", step, cause=cause)
    say(f"WARNING: {cause}")


def was_set_aside(directory: Any, good: Mapping[str, Any]) -> bool:
    """True if the last good step was set aside, where earlier versions did not forget it: it is not lost.

    One that was saved anew after that, and is gone, is. Where its record cannot be read, as of a damaged one, it is
    taken for the same.
    """
    for place in folders.those_set_aside(directory):
        if place.name.split("-")[1] == str(good["step"]):
            try:
                same = restore.load_record(place)["sha256"] == good["sha256"]
            except restore.Unreadable:
                same = True
            if same:
                return True
    return False
