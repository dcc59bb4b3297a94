"""Counts and times JAX compilations."""

from typing import Any

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"  # the event that JAX records for each compilation


class CompileLog:
    """Context manager that records the compilations of JAX."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}  # function name -> seconds of each program compiled
        self.from_cache = 0

    @property
    def count(self) -> int:
        """Number of programs compiled or read from the compilation cache."""
        return sum(map(len, self.seconds.values()))

    def __enter__(self) -> "CompileLog":
        jax.monitoring.register_event_duration_secs_listener(self.note)
        jax.monitoring.register_event_listener(self.note_hit)
        return self

    def __exit__(self, *exc: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self.note)
        jax.monitoring.unregister_event_listener(self.note_hit)

    def note(self, event: str, duration_secs: float, **facts: Any) -> None:
        """Records a compilation; a listener for duration events."""
        if event == COMPILED:
            name = str(facts.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            self.seconds.setdefault(name, []).append(duration_secs)

    def note_hit(self, event: str, **facts: Any) -> None:
        """Counts a hit of the compilation cache; a listener for events."""
        self.from_cache += event == "/jax/compilation_cache/cache_hits"
