"""New arrays of a checkpoint, written a piece at a time by one process, as Orbax's handler of arrays reads them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore

from jaxscale.checkpoint import stored
from jaxscale.checkpoint.cause import short_cause
from jaxscale.checkpoint.stored import Box, box_bytes
from jaxscale.system.exits import Exit, Stop

COMMIT_BYTES = 64 << 20  # written at once: each commit writes the index anew, and holds this much memory
# Of a node of the index: a commit writes those that it changes, and all their versions stay in the files. TensorStore's
# default of 8 MB would hold the whole index of 10,000 pieces in one node.
NODE_BYTES = 128 << 10
DICT_KEY = 2  # how Orbax writes that a level of the tree is a dict


@dataclasses.dataclass(frozen=True)
class Layout:
    """How TensorStore keeps an array: its driver, that driver's metadata, and the index's settings."""

    driver: str
    metadata: Mapping[str, Any]
    index: Mapping[str, Any]


def layout_of(array: tensorstore.TensorStore) -> Layout:
    """That of an array that is there."""
    spec = array.spec().to_json()
    index = {key: value for key, value in spec["kvstore"].get("config", {}).items() if key != "uuid"}
    return Layout(spec["driver"], spec["metadata"], index)


def new_layout(shape: Sequence[int], chunks: Sequence[int], dtype: np.dtype) -> Layout:
    """That of an array as Orbax makes it (zarr 2, not compressed), in pieces of `chunks`."""
    metadata = {"zarr_format": 2, "shape": list(shape), "chunks": list(chunks), "dtype": np.dtype(dtype).str}
    metadata |= {"compressor": None, "fill_value": None, "filters": None, "order": "C", "dimension_separator": "."}
    return Layout("zarr", metadata, {"max_decoded_node_bytes": NODE_BYTES})


def tree_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What Orbax writes of a tree of nested dicts into its `_METADATA`, for arrays of these names and shapes."""
    entries = {}
    for name, shape in shapes.items():
        keys = name.split("/")
        entries[repr(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": DICT_KEY} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(shape)},
        }
    return {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


class Output:
    """Arrays below a step's folder, many of them written in one transaction."""

    def __init__(self, folder: Any):
        self.folder = folder
        self.transaction, self.pending, self.bytes = None, [], 0
        self.context = tensorstore.Context()

    def create(self, layouts: Mapping[str, Layout]) -> list[tensorstore.TensorStore]:
        """Arrays of these names and layouts, in order; the index is written once for all.

        One that is there already, of the same layout, is opened. Raises Stop (STORAGE).
        """
        transaction = tensorstore.Transaction()
        how = dict(open=True, create=True, context=self.context, transaction=transaction)
        try:
            made = [tensorstore.open(self.spec(name, layout), **how) for name, layout in layouts.items()]
            arrays = [future.result() for future in made]
            transaction.commit_sync()
        except ValueError as error:
            raise self.failure(error) from None
        return [array.with_transaction(None) for array in arrays]

    def spec(self, name: str, layout: Layout) -> dict[str, Any]:
        """TensorStore's description of a new array."""
        base = stored.kvstore(self.folder / stored.STATE)
        store = {"driver": "ocdbt", "base": base, "config": dict(layout.index), "path": f"{stored.stored_name(name)}/"}
        wanted = {"driver": layout.driver, "kvstore": store, "metadata": dict(layout.metadata)}
        # or a piece of zeros would be left out, and a lost one would read as zeros
        return wanted | {"store_data_equal_to_fill_value": True}

    def write(self, array: tensorstore.TensorStore, box: Box, value: np.ndarray) -> bool:
        """Takes a piece, which is on the disk at the latest after `commit`; True if it and all before it are now."""
        if self.transaction is None:
            self.transaction = tensorstore.Transaction()
        self.pending.append(array.with_transaction(self.transaction)[box].write(value))
        self.bytes += box_bytes(array, box)
        if self.bytes >= COMMIT_BYTES:
            self.commit()
        return self.transaction is None

    def commit(self) -> None:
        """Returns when all pieces so far are on the disk. Raises Stop (STORAGE)."""
        if self.transaction is None:
            return
        try:
            for future in self.pending:
                future.copy.result()  # the commit waits for the rest
            self.transaction.commit_sync()
        except ValueError as error:
            raise self.failure(error) from None
        self.transaction, self.pending, self.bytes = None, [], 0

    def failure(self, error: BaseException) -> Stop:
        """The error for what could not be written."""
        return Stop(Exit.STORAGE, f"{self.folder} cannot be written: {short_cause(error)}; run it again")
