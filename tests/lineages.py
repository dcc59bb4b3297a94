"""The lineage of a shard as a table."""

from jaxscale.runtime.data.shards import open_lineage


def read_lineage(shard):
    """All rows and columns, read as `jaxscale trace` reads some of them."""
    with open_lineage(shard.lineage_path) as file:
        return file.read(use_threads=False)
