"""How long a run may write nothing before it counts as silent: the same for the report, its server and the terminal."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.reporting.history import is_finite

QUIET_SECONDS = 180.0  # saves, validation and a bucket's uploads lie between two lines
RECORDS = 10  # or as long as so many of them take
STARTING_SECONDS = 3600.0  # before the first one, while it compiles: the default of hang.compile_seconds
RECENT = 20  # records over which their distance is taken


def patience_seconds(records: Sequence[Mapping[str, Any]], began_at: int) -> float:
    """Seconds without a line after which a run is silent. began_at: the step that its last start went on from."""
    own = [record for record in records if "loss" in record and (record.get("step") or 0) > began_at][-RECENT:]
    if not own:
        return STARTING_SECONDS
    first = own[0]["step"] if len(own) > 1 else began_at
    stride = (own[-1]["step"] - first) / max(len(own) - 1, 1)
    times = [record["step_seconds"] for record in own if is_finite(record.get("step_seconds"))]
    return max(QUIET_SECONDS, RECORDS * stride * (statistics.median(times) if times else 0.0))
