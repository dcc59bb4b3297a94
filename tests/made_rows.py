"""Rows over documents whose tokens are all different, planned as a run plans them."""

import itertools
import os
import pathlib
from unittest import mock

import numpy as np

from jaxscale.runtime.data.array_folder import ArrayWriter, open_arrays
from jaxscale.runtime.data.documents import DocumentChunk, SplitRule, TokenSet, write_documents
from jaxscale.runtime.data.packing import order_generator
from jaxscale.runtime.data.row_plan import PlanSettings, open_rows, write_rows
from jaxscale.runtime.data.verified import snapshot_files

NUMBERS = itertools.count()


def make_files(folder, lengths, dtypes=("<u4",), firsts=(1,)):
    """A .bin for each list of lengths, of ids that count from its first one, as what the loader knows of it."""
    files = []
    for number, (own, dtype, first) in enumerate(zip(lengths, dtypes, firsts)):
        path = folder / f"ids{number}.bin"
        (np.arange(sum(own)) + first).astype(dtype).tofile(path)
        files.append((str(path), dtype, "", len(own), sum(own), snapshot_files({str(path): ""})))
    return TokenSet(files)


def make_rows(folder, lengths, T, *, packing="best_fit", seed=0, sources=None, groups=1, files=None, wide=False):
    """Rows of T tokens over documents of these lengths, which lie in `files`; else in one file, numbered from 1."""
    lengths = np.array(lengths, np.int64)
    sources = np.zeros(len(lengths), np.uint16) if sources is None else np.array(sources, np.uint16)
    made = pathlib.Path(folder) / f"plan-{next(NUMBERS)}"
    made.mkdir()
    real = lengths > 0
    keep_empty = packing == "best_fit" and groups == 1
    chunk = DocumentChunk(lengths, sources, np.ones_like(real) if keep_empty else real, np.zeros_like(real))
    with mock.patch.object(os, "fsync"), ArrayWriter(made) as out:  # nobody cuts the power here
        facts = write_documents(
            out, [chunk], SplitRule(), max(groups, int(sources.max()) + 1), {"train": groups}, use_int64=wide
        )
        settings = PlanSettings("", packing, "concat", T, seed, groups)
        out.finish({"documents": facts, "words": "", "parts": write_rows(out, facts, settings)})
    files = make_files(folder, [lengths.tolist()]) if files is None else files
    return open_rows(open_arrays(made, pathlib.Path(folder)), files).train


def document_order(count, seed):
    """A permutation that depends only on seed and count, not on the numpy version."""
    return np.argsort(order_generator(seed).random_raw(count), kind="stable")


def whole(rows):
    """All rows as one batch."""
    return rows.read(rows.locate(np.arange(len(rows))), range(len(rows)))
