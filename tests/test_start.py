"""Whether a run may go on as it is asked to: the flags of one start."""

import pytest

from jaxscale.runtime.run.options import RunOptions
from jaxscale.settings.command_line import parse


def test_flags_are_options_of_one_start():
    assert parse([], RunOptions).flags == RunOptions()
    flags = ["--stop_after=20", "--allow_change=optim.peak_lr, train.guard", "--replay=old", "--steal_lock"]
    assert parse(flags, RunOptions).flags == RunOptions(20, ("optim.peak_lr", "train.guard"), "old", True)


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--stop_after=0", "--stop_after=0 must be a whole number, 1 or more"),
        ("--stop_after=soon", "--stop_after=soon must be a whole number, 1 or more"),
        ("--allow_change=optim.peek_lr", "--allow_change=optim.peek_lr is not a setting"),
    ],
)
def test_flags_that_mean_nothing_are_refused(flag, told):
    with pytest.raises(ValueError, match=told):
        parse([flag], RunOptions)
