"""The feed hands over batches in order, raises what its reader raised, and ends when it is closed."""

import threading
import time

import numpy as np
import pytest
import tiny

from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.shardings import TENSOR, batch_sharding
from jaxscale.runtime.training.feed import Feed


def make_feed(read, start=0, stop=5, batch_index=lambda step: step, transforms=()):
    sharding = batch_sharding(make_mesh(MeshConfig()), TENSOR)
    shape = dict(num_rows=lambda n: 16, row_tokens=lambda n: tiny.SEQ_LEN, seq_len=tiny.SEQ_LEN)
    return Feed(read, batch_index, sharding, range(start, stop), transforms=transforms, **shape)


def read_packed(n, rows):
    assert rows == list(range(16))
    return tiny.packed_batch(n)


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    yield
    assert not [thread for thread in threading.enumerate() if "prefetch" in thread.name]


def test_batches_come_in_order_and_placed():
    feed = make_feed(read_packed, start=3, stop=6, batch_index=lambda step: step + 10)
    found = list(feed)
    feed.close()
    assert [item.batch_index for item in found] == [13, 14, 15]
    for item, n in zip(found, (13, 14, 15)):
        np.testing.assert_array_equal(item.batch.tokens, tiny.packed_batch(n).tokens)
        assert {shard.data.shape for shard in item.batch.tokens.addressable_shards} == {(2, tiny.SEQ_LEN)}


@pytest.mark.fault("F23")
def test_an_error_of_the_reader_is_raised_where_the_batch_is_asked_for():
    def read(n, rows):
        if n == 2:
            raise ValueError("data: row 7 of shard 3 is damaged")
        return tiny.packed_batch(n)

    feed = make_feed(read)
    assert [next(feed).batch_index, next(feed).batch_index] == [0, 1]
    with pytest.raises(ValueError, match="row 7 of shard 3"):
        next(feed)
    feed.close()


def test_it_reads_ahead_but_not_without_bound_and_closing_ends_it():
    read = []
    feed = make_feed(lambda n, rows: read.append(n) or tiny.packed_batch(n), stop=1000)
    deadline = time.monotonic() + 20
    while len(read) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(read) == Feed.AHEAD + 1  # those in the queue, and one in the hand
    began = time.monotonic()
    feed.close()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("ends", [SystemExit, ValueError])
def test_what_ends_a_transform_ends_the_step_that_needs_its_batch(ends):
    def transform(batch, n, rows):
        if n == 1:
            raise ends("enough")
        return batch._replace(tokens=batch.tokens + 1)

    feed = make_feed(read_packed, transforms=(transform,))
    np.testing.assert_array_equal(next(feed).batch.tokens, tiny.packed_batch(0).tokens + 1)
    with pytest.raises((RuntimeError, ValueError), match="enough"):
        next(feed)
    feed.close()


def test_closing_leaves_a_read_that_is_stuck_behind(monkeypatch):
    monkeypatch.setattr("jaxscale.runtime.training.feed.CLOSE_SECONDS", 0.2)
    stuck, go_on = threading.Event(), threading.Event()

    def read(n, rows):
        stuck.set()
        go_on.wait(30)
        return tiny.packed_batch(n)

    feed = make_feed(read)
    assert stuck.wait(20)
    began = time.monotonic()
    feed.close()
    assert time.monotonic() - began < 10
    assert all(thread.daemon for thread in threading.enumerate() if "prefetch" in thread.name)
    go_on.set()
    feed.close()


def test_a_feed_of_no_steps_ends_at_once():
    feed = make_feed(read_packed, start=5, stop=5)
    assert list(feed) == []
    feed.close()
