"""Files that survive a power cut: fsync of what was written, before the rename that makes it count."""

import os
import pathlib

from jaxscale.system import paths


def sync_tree(folder: pathlib.Path) -> None:
    """Returns when all files below a local folder, and the folders' own lists of names, are on the disk."""
    for parent, _, files in os.walk(folder):
        for name in files:
            handle = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        paths.sync_folder(pathlib.Path(parent))
