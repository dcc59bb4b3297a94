"""Reading a lineage leaves no thread behind that could abort the process while Python ends."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os
import tempfile
import pyarrow.parquet
from jaxscale.runtime.text.document import Document
from jaxscale.runtime.data.shard_writer import lineage_bytes, lineage_table
from jaxscale.runtime.data.shards import open_lineage
content = lineage_bytes(lineage_table([Document("a", file="f", offset=n) for n in range(9)]), 9)
before = set(os.listdir("/proc/self/task"))
with tempfile.NamedTemporaryFile() as file:
    file.write(content)
    file.flush()
    with open_lineage(file.name) as lineage:
        table = lineage.read_row_group(0, columns=["file", "offset"], use_threads=False)
assert table["offset"].to_pylist() == list(range(9))
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in set(os.listdir("/proc/self/task")) - before]
print([name for name in names if "jemalloc" not in name])
"""


@pytest.mark.slow
def test_no_thread_holds_what_was_read():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
