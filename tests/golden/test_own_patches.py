"""Tests fail what a function asks for, and seldom replace the function."""

import pytest
from own_patches import TESTS, own_patches

MOST = 10  # in all tests: of functions and classes of ours, which a seam would spare


@pytest.mark.slow
def test_few_tests_replace_functions_of_ours():
    files = sorted(TESTS.rglob("*.py"))
    found = [f"{path.relative_to(TESTS)}:{line}" for path in files for line in own_patches(path.read_text("utf-8"))]
    assert 0 < len(found) <= MOST, "split the function, or fail what it asks:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "call, seen",
    [
        ("patch.setattr(write, 'free_bytes', f)", 1),
        ("patch.setattr('jaxscale.runtime.checkpoint.write.free_bytes', f)", 1),
        ("mock.patch.object(write, 'free_bytes')", 1),
        ("patch.setattr(found.rules[0], 'look', f)", 1),
        ("for name in ('MARGIN', 'room_text'):\n    patch.setattr(write, name, f)", 1),
        ("patch.setattr(*place, f)", 1),
        ("patch.setattr(write, 'MARGIN', 2)", 0),
        ("for name in ('MARGIN', 'FULL'):\n    patch.setattr(write, name, 2)", 0),
        ("patch.setattr(write.shutil, 'disk_usage', f)", 0),
        ("patch.setattr(os, 'open', f)", 0),
        ("patch.setitem(__import__('sys').modules, 'ftfy', None)", 0),
    ],
)
def test_a_replaced_function_of_ours_is_seen(call, seen):
    assert len(own_patches(f"import os\nfrom jaxscale.runtime.checkpoint import write\n{call}")) == seen
