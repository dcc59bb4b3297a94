"""What one process can know of another."""

import dataclasses
import json

from jaxscale.runtime.checkpoint.lock_stores import LOCK_BYTES, is_alive, read_owner, this_process


def test_what_a_kernel_says_of_a_process():
    me = this_process()
    assert is_alive(me, me) is True
    assert is_alive(dataclasses.replace(me, ticks=me.ticks + 1), me) is False  # the number was used again
    assert is_alive(dataclasses.replace(me, pid=2**22 + 1), me) is False
    assert is_alive(dataclasses.replace(me, namespace="pid:[0]"), me) is None  # a container beside this one
    assert is_alive(dataclasses.replace(me, kernel="x"), me) is None
    for letter, expected in (("R", True), ("T", None), ("Z", False)):
        assert is_alive(me, me, lambda pid, letter=letter: (letter, me.ticks)) is expected
    assert len(me.content()) == LOCK_BYTES and read_owner(me.content()) == me
    assert read_owner(json.dumps({"token": 1}).encode()) is None and read_owner(b"") is None
