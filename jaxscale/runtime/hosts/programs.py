"""A compilation cache for runs of several hosts, on each machine's disk and in a shared folder.

By default only process 0 writes jax's compilation cache, so with local disks every other host compiles at each start.
With this module, each process writes a local cache, and process 0 also writes a shared folder, from which new machines
read. The cache contains code: write access to the folder allows running programs on the hosts.

jax has no public API for this. Only this file uses jax's private names, of versions 0.10.2 and 0.12.0.
"""

import hashlib
import os
import pathlib
import warnings
from typing import Any

import jax
from jax._src import compilation_cache, compiler, config, distributed
from jax.experimental.compilation_cache import compilation_cache as public

from jaxscale.system import paths
from jaxscale.system.process import environment

DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
SUFFIX = "-cache"  # suffix of jax's cache entries
jax_cache, jax_cache_write = compilation_cache.get_file_cache, compiler._cache_write


def enable_shared_cache(workdir: str) -> None:
    """Installs the two-level cache. Call it before jax compiles.

    A single process with a local work folder uses jax's cache unchanged. To share a cache between runs, set
    JAX_COMPILATION_CACHE_DIR: a gs:// folder replaces the shared folder, and a local folder replaces the local one.
    """
    default = environment()[DIRECTORY]
    chosen = os.environ.get(DIRECTORY, default)
    is_shared = paths.is_remote(workdir) or distributed.global_state.client is not None
    if not config.enable_compilation_cache.value:
        return
    shared, make = None, jax_cache
    if is_shared or paths.is_remote(chosen):
        if chosen == default:
            shared = paths.absolute(workdir) / "compiled"
        elif paths.is_remote(chosen):
            shared = paths.as_path(chosen)
            jax.config.update("jax_compilation_cache_dir", default)
        is_first = distributed.global_state.process_id == 0
        make = lambda path: (TwoLevelCache(pathlib.Path(path), shared, is_first=is_first), path)
    if make is not compilation_cache.get_file_cache:
        compilation_cache.get_file_cache, compiler._cache_write = make, write_entry
        public.reset_cache()  # closes a cache that an earlier compilation has opened


def write_entry(key: str, seconds: float, name: str, backend: Any, executable: Any, *callbacks: Any) -> None:
    """Replaces jax's _cache_write, which does nothing on processes other than 0."""
    if distributed.global_state.process_id == 0:
        return jax_cache_write(key, seconds, name, backend, executable, *callbacks)
    if any(callbacks) or seconds < config.persistent_cache_min_compile_time_secs.value:
        return None
    try:
        compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
    except Exception as error:  # as in jax, since the program can run without the cache
        warnings.warn(f"{name} is not stored in the compilation cache: {type(error).__name__}: {error}", stacklevel=2)
    return None


class TwoLevelCache:
    """Implementation of jax's cache interface with a local folder and a folder that all processes can read."""

    def __init__(self, local: pathlib.Path, shared: Any, *, is_first: bool):
        """`shared` is a local or remote folder, or None. Only the process with is_first=True writes to it."""
        self.local, self.shared, self.is_first = local, shared, is_first
        self._path = local  # jax logs it when it resets its cache

    def get(self, key: str) -> bytes | None:
        """Returns the compiled program, or None."""
        try:
            return (self.local / f"{key}{SUFFIX}").read_bytes()
        except OSError:  # missing or unreadable
            pass
        try:
            entry = paths.read_bytes(self.shared / f"{key}{SUFFIX}") if self.shared is not None else b""
        except FileNotFoundError:
            return None
        digest, program = entry[:32], entry[32:]
        if hashlib.sha256(program).digest() != digest:
            return None
        self.write_local(key, program)
        return program

    def put(self, key: str, program: bytes) -> None:
        """Writes a program that this process has compiled."""
        self.write_local(key, program)
        if self.shared is not None and self.is_first:
            if not paths.is_remote(self.shared):
                paths.make_private(self.shared)
            paths.write_bytes_atomic(self.shared / f"{key}{SUFFIX}", hashlib.sha256(program).digest() + program)

    def write_local(self, key: str, program: bytes) -> None:
        """Writes a program to the local folder atomically. Ignores errors."""
        try:
            paths.make_private(self.local)
            paths.write_bytes_atomic(self.local / f"{key}{SUFFIX}", program)
        except OSError:
            pass
