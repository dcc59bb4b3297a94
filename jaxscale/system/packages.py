"""Detects optional packages by their distributions, since importing may also find a folder in the current directory."""

import importlib.metadata

# {name of the import: distributions that provide it}, where the names differ
DISTRIBUTIONS = {"fasttext": ("fasttext", "fasttext-predict", "fasttext-wheel"), "libtpu": ("libtpu", "libtpu-nightly")}


def is_installed(package: str) -> bool:
    """Returns True if a distribution that provides the package is installed. Does not import it."""
    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False
