"""Whether a run may go on as it is asked to: the flags of one start."""

import pytest

from jaxscale.run.options import Wishes, wishes_of


def test_flags_are_wishes_of_one_start():
    assert wishes_of({}, set()) == Wishes()
    found = wishes_of(
        {"stop_after": "20", "allow_change": "optim.peak_lr, train.guard", "replay": "old"}, {"steal_lock"}
    )
    assert found == Wishes(20, ("optim.peak_lr", "train.guard"), "old", True)


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
        wishes_of(flags, set())
