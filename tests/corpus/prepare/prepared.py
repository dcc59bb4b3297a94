"""Small sets that are prepared, and what is in them."""

import hashlib
import io
import json

import numpy as np
from lineages import read_lineage

from jaxscale import schema
from jaxscale.runtime.data.shards import open_shard
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.corpus.prepare.engine import make_plan, prepare
from jaxscale.tools.corpus.prepare.local import LocalExecutor
from jaxscale.tools.corpus.prepare.progress import PrepareProgress

BYTES = {"tokenizer": {"name": "bytes"}, "block_bytes": 4096}


def recipe(files, **values):
    sources = {"text": {"files": str(files)}}
    return schema.from_dict(PrepareConfig, {"sources": sources, "stages": (), **BYTES, **values})


def run(cfg, output, workers=1, **options):
    with LocalExecutor(workers) as executor:
        prepare(make_plan(cfg), output, executor, PrepareProgress(io.StringIO()), **options)
    return output


def contents(folder):
    """{file: sha256} of everything in a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def documents_in(folder):
    """[(source, file, offset, id, ids)] of all shards in order."""
    found = []
    for entry in json.loads((folder / "manifest.json").read_text())["shards"]:
        shard = open_shard(folder / f"{entry['name']}.json")
        ids = np.fromfile(shard.bin_path, shard.header["dtype"])
        lineage = read_lineage(shard).to_pylist()
        names = [shard.header["sources"][i] for i in shard.source_ids]
        bounds = zip(shard.offsets[:-1], shard.offsets[1:])
        found += [
            (name, row["file"], row["offset"], row["id"], ids[a:b].tolist())
            for name, row, (a, b) in zip(names, lineage, bounds)
        ]
    return found
