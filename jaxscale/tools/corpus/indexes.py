"""Indexes of a finished set: its documents by name, and the row plans of runs with known settings.

Each index is a folder with its own checksums, named by its inputs. The manifest does not list it, so indexes can be
added to a set at any time.
"""

from collections.abc import Callable
from pathlib import Path

from jaxscale.runtime.data.array_folder import HEADER
from jaxscale.runtime.data.config import DataConfig, MixtureSetting
from jaxscale.runtime.data.ledger import publish_names
from jaxscale.runtime.data.manifest import NAME as MANIFEST
from jaxscale.runtime.data.manifest import check_manifest, open_set
from jaxscale.runtime.data.pipeline import publish_plan
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.prepare.config import RowsConfig

KINDS = ("names", "rows")


def publish_indexes(folder: Path, cfg: RowsConfig, say: Callable[[str], None]) -> None:
    """Writes the indexes of the finished set in `folder` that do not exist yet.

    Raises: BadInput if the set is incomplete, and for rows longer than all its tokens.
    """
    shards = open_set(check_manifest(folder / MANIFEST, deep=False))
    publish_names(folder, shards)
    sources: MixtureSetting = {name: 1.0 for shard in shards for name in shard.header["sources"]}
    data = DataConfig(
        name="tokens",
        files=str(folder / MANIFEST),
        val_fraction=cfg.val_fraction,
        packing=cfg.packing,
        mixture=sources if cfg.mixture else {},
    )
    for seq_len in cfg.seq_lens:
        try:
            place = publish_plan(folder, data, shards, seq_len=seq_len, seed=cfg.seed)
        except BadInput as error:
            raise BadInput(f"rows.seq_len={seq_len}: {error}") from None
        say(f"{place}: the rows of {seq_len:,} tokens, planned")


def index_files(folder: Path) -> list[str]:
    """Returns the index files in a folder, relative to it; headers, which complete an index, are last."""
    found = [path for kind in KINDS for path in folder.glob(f"{kind}-*/*") if path.is_file()]
    return sorted((str(path.relative_to(folder)) for path in found), key=lambda name: (name.endswith(HEADER), name))
