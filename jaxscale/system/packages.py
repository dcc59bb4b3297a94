"""Optional packages, detected by their distributions: a folder in the current directory satisfies an import too."""

import importlib.metadata

# {name of the import: names of the distributions that bring it}, where pip knows it by another name
DISTRIBUTIONS = {"fasttext": ("fasttext", "fasttext-predict", "fasttext-wheel"), "libtpu": ("libtpu", "libtpu-nightly")}


def is_installed(package: str) -> bool:
    """Returns True if a distribution that provides the package is installed. Imports nothing."""
    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False
