"""Stages of collectives along the torus, on slices whose links are counted by hand."""

import types

import numpy as np
import pytest

from jaxscale.kernels.hardware import CHIPS
from jaxscale.tools.planning.links import (
    Phase,
    collective_phases,
    concurrent_phases,
    group_lines,
    make_torus,
    permute_links,
    ring_over,
)

V5P, V5E, H100 = (CHIPS[kind] for kind in ("TPU v5", "TPU v5 lite", "NVIDIA H100 80GB HBM3"))


def torus(chip, *sides):
    """The torus of a slice's devices in rising order of their places."""
    places = [place + (0,) * (3 - len(sides)) for place in np.ndindex(*sides)]
    return make_torus([types.SimpleNamespace(coords=place) for place in places], chip)


def lines(chip, sides, members):
    """(dimension, members, links) of a group."""
    place = torus(chip, *sides)
    return [(one.along, one.size, round(one.share * place.num_links, 9)) for one in group_lines(place, members)]


@pytest.mark.parametrize(
    ("chip", "sides", "members", "expected"),
    [
        (V5P, (4, 4, 4), range(64), [("x", 4, 2), ("y", 4, 2), ("z", 4, 2)]),
        (V5P, (4, 4, 4), range(4), [("z", 4, 2)]),  # a ring
        (V5P, (4, 4, 4), range(0, 64, 16), [("x", 4, 2)]),
        (V5P, (4, 4, 8), range(4), [("z", 4, 1)]),  # half of a ring is a line
        (V5P, (4, 4, 8), range(0, 8, 2), [("z", 4, 1)]),  # every second chip of a ring: two groups divide two links
        (V5P, (2, 2, 4), range(16), [("x", 2, 1), ("y", 2, 1), ("z", 4, 1)]),  # under a cube nothing is closed
        (V5E, (8, 8), range(64), [("x", 8, 1), ("y", 8, 1)]),
        (V5E, (16, 16), range(16), [("y", 16, 2)]),
        (V5E, (4, 4), [0, 1, 2, 3, 7, 6], [("xy", 6, 1)]),  # a snake that fills no box
        (V5E, (4, 4), [5], []),
    ],
)
def test_a_group_has_the_links_of_the_dimensions_that_it_lies_along(chip, sides, members, expected):
    assert lines(chip, sides, list(members)) == expected


def test_a_switch_serves_any_group_with_all_links():
    assert group_lines(make_torus([types.SimpleNamespace()], H100), [0, 3, 5]) == (Phase("switch", 3, 1.0),)


def test_two_devices_of_one_chip_need_no_link_of_the_torus():
    devices = [types.SimpleNamespace(coords=(x, 0, 0), core_on_chip=core) for x in range(2) for core in range(2)]
    found = group_lines(make_torus(devices, CHIPS["TPU7x"]), range(4))
    assert [(one.along, one.size) for one in found] == [("x", 2), ("core", 2)]


def test_sums_are_scattered_from_the_outermost_dimension_and_gathered_to_it():
    group = group_lines(torus(V5P, 2, 2, 4), range(16))
    sent = {
        kind: [(s.along, s.nbytes) for s in collective_phases(kind, 1600.0, group)]
        for kind in ("all-gather", "reduce-scatter")
    }
    assert sent["reduce-scatter"] == [("x", 800), ("y", 400), ("z", 300)]
    assert sent["all-gather"] == sent["reduce-scatter"][::-1]
    assert [s.nbytes for s in collective_phases("all-reduce", 1600.0, group)] == [800, 400, 300, 300, 400, 800]


@pytest.mark.parametrize(("sides", "seconds"), [((8, 8), 1e9 * 7 / 8 / 50e9), ((16, 16), 1e9 * 15 / 16 / 100e9)])
def test_a_stage_takes_its_bytes_over_the_bandwidth_of_its_own_links(sides, seconds):
    place = torus(V5E, *sides)  # 50 GB/s a link, in one direction
    (stage,) = collective_phases("all-gather", 1e9, group_lines(place, range(sides[1])))
    assert stage.seconds(V5E) == pytest.approx(seconds)
    assert stage.seconds(CHIPS["Tesla T4"]) is None


def test_both_dimensions_at_once_take_half_the_time_of_one_after_the_other():
    place = torus(V5E, 8, 8)
    group = group_lines(place, range(64))
    after = sum(stage.seconds(V5E) for stage in collective_phases("all-gather", 1e9, group))
    (beside,) = concurrent_phases("all-gather", 1e9, group)
    (ring,) = collective_phases("all-gather", 1e9, ring_over(group, place.num_links))
    assert beside.seconds(V5E) == pytest.approx(after / 2) == pytest.approx(ring.seconds(V5E))
    assert beside.nbytes == pytest.approx(1e9 * 63 / 64) and beside.queues == ring.queues == ("x", "y")


def test_an_exchange_is_bound_by_the_middle_link():
    line, ring = (
        [one] for one in (*group_lines(torus(V5P, 2, 2, 4), range(4)), *group_lines(torus(V5P, 4, 4, 4), range(4)))
    )
    link = V5P.ici_bandwidth / 6
    (on_line,), (on_ring,) = collective_phases("all-to-all", 8e8, line), collective_phases("all-to-all", 8e8, ring)
    assert on_line.nbytes == 6e8
    assert on_line.seconds(V5P) == pytest.approx(8e8 / link)  # 2 x 2 messages of 2e8 bytes
    assert on_ring.seconds(V5P) == pytest.approx(4e8 / link)


@pytest.mark.parametrize(
    ("sides", "pairs", "along", "messages"),
    [
        ((4, 4, 4), [(0, 1), (1, 2), (2, 3), (3, 0)], "z", 1),
        ((2, 2, 4), [(0, 1), (1, 2), (2, 3), (3, 0)], "z", 1),  # back over the line, against the others
        ((2, 2, 4), [(0, 2), (1, 3)], "z", 2),  # both pass the link between 1 and 2
        ((2, 2, 4), [(0, 5)], "yz", 1),
    ],
)
def test_a_permute_is_as_slow_as_its_busiest_link(sides, pairs, along, messages):
    (stage,) = permute_links(torus(V5P, *sides), pairs)
    assert (stage.along, stage.share) == (along, pytest.approx(1 / 6 / messages))
    assert permute_links(torus(V5P, *sides), [(3, 3)]) == ()
