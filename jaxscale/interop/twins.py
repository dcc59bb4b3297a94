"""A table that is written twice: models whose output projection is their embedding, saved with both names."""

from collections.abc import Mapping

from jaxscale.interop.families import Match
from jaxscale.interop.safetensors import Tensor
from jaxscale.system.exits import BadInput

BLOCK_BYTES = 32 << 20
HEAD = "lm_head.weight"


def check_twins(matched: Match, tensors: Mapping[str, Tensor]) -> None:
    """Raises BadInput if a head that is left out, as tied to the embedding, holds other numbers than that."""
    for name in matched.left_out:
        if not name.endswith(HEAD):
            continue
        table = next(tensors[pair.theirs] for pair in matched.pairs if pair.ours == ("embedding",))
        if not same_bytes(table, tensors[name]):
            raise BadInput(
                f"{tensors[name].file.path}: {name} is not the same as {table.name}, though config.json says "
                "tie_word_embeddings; set that to false there"
            )


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are equal bit for bit; a few MB of each are in memory."""
    if (one.kind, one.shape) != (other.kind, other.shape):
        return False
    size = one.stop - one.start
    for begin in range(0, size, BLOCK_BYTES):
        end = min(begin + BLOCK_BYTES, size)
        if one.file.read(one.start + begin, one.start + end) != other.file.read(other.start + begin, other.start + end):
            return False
    return True
