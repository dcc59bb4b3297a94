"""An environment without any optional package: a stand-in for importlib.metadata.distribution."""

import importlib.metadata
from typing import NoReturn


def no_distribution(name: str) -> NoReturn:
    """Raises PackageNotFoundError, as where the distribution is not installed."""
    raise importlib.metadata.PackageNotFoundError(name)
