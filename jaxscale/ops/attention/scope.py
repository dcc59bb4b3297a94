"""Which keys a query may see, where segment numbers alone do not say it.

B batch  T query position  S key position
"""

from typing import NamedTuple

import jax


class Scope(NamedTuple):
    """What an attention takes in the place of segment_ids_BT, if it can do more than read one row causally."""

    segment_ids_BT: jax.Array
    prefix_BT: jax.Array | None = None  # int32: 1 for a key that every query of its document sees; none: there is none
    key_segment_ids_BS: jax.Array | None = None  # of keys from another row than the queries; none: of the same


def as_scope(segments: jax.Array | Scope) -> Scope:
    """Segment numbers as the scope that says no more."""
    return segments if isinstance(segments, Scope) else Scope(segments)


def narrowed(segment_ids_BT: jax.Array, prefix_BT: jax.Array | None) -> jax.Array | Scope:
    """The plainest form of the two, which every kernel takes where there is no prefix."""
    return segment_ids_BT if prefix_BT is None else Scope(segment_ids_BT, prefix_BT)
