"""Whether a run may go on as it is asked to: the flags of one start."""

import pytest

from jaxscale.run.options import RunOptions, parse_options


def test_flags_are_parse_options_one_start():
    assert parse_options({}, set()) == RunOptions()
    found = parse_options(
        {"stop_after": "20", "allow_change": "optim.peak_lr, train.guard", "replay": "old"}, {"steal_lock"}
    )
    assert found == RunOptions(20, ("optim.peak_lr", "train.guard"), "old", True)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"stop_after": "0"}, "--stop_after=0 must be a step"),
        ({"stop_after": "soon"}, "--stop_after=soon must be a step"),
        ({"allow_change": "optim.peek_lr"}, "--allow_change=optim.peek_lr is no setting"),
    ],
)
def test_flags_that_mean_nothing_are_refused(flags, told):
    with pytest.raises(ValueError, match=told):
        parse_options(flags, set())
