"""Cases of a test that cost much and prove what the others prove: left to the soak."""

from collections.abc import Sequence
from typing import Any

import pytest


def twins(cases: Sequence[Any], *by_default: Any) -> list[Any]:
    """The cases for pytest.mark.parametrize, marked `soak` but for those that run by default."""
    assert all(case in cases for case in by_default), by_default
    marked = lambda case: pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)
    return [case if case in by_default else marked(case) for case in cases]
