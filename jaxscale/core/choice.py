"""A choice between implementations, with the reason for it."""

from typing import NamedTuple


class Choice(NamedTuple):
    """One decision of a parallel plan."""

    requested: str = "auto"  # the setting
    name: str = ""  # what is used; "" where there is nothing to choose
    reason: str = ""
