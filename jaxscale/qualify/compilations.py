"""Counts and times what JAX compiles."""

from typing import Any

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's name for one compilation


class CompileLog:
    """Records JAX's compilations while this is entered."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}  # by name of the function, one for each program
        self.from_cache = 0

    @property
    def count(self) -> int:
        """The number of programs that were compiled, or read from the cache."""
        return sum(map(len, self.seconds.values()))

    def __enter__(self) -> "CompileLog":
        jax.monitoring.register_event_duration_secs_listener(self.note)
        jax.monitoring.register_event_listener(self.note_hit)
        return self

    def __exit__(self, *exc: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self.note)
        jax.monitoring.unregister_event_listener(self.note_hit)

    def note(self, event: str, duration_secs: float, **facts: Any) -> None:
        """Listens to durations."""
        if event == COMPILED:
            name = str(facts.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            self.seconds.setdefault(name, []).append(duration_secs)

    def note_hit(self, event: str, **facts: Any) -> None:
        """Listens to events."""
        self.from_cache += event == "/jax/compilation_cache/cache_hits"
