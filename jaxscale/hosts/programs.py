"""Compiled programs that every process of a run finds again: on its own machine, or else beside the work folder.

By itself jax lets the first process alone write its compilation cache: on a disk of its own every other host compiles
anew at each start. Here each process keeps what it has compiled on its machine, and the first one in a folder that all
can read as well, where a machine that is new, or was given back with its disk, finds what all of a run compile.
What lies there is code: who may write the folder may run programs on the hosts.

jax has no public way to any of this; its private names are used in this file alone, by jax 0.10.2 and 0.12.0.
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
ENDING = "-cache"  # as jax names its entries
jax_cache, write_as_the_first = compilation_cache.get_file_cache, compiler._cache_write


def keep_programs(workdir: str) -> None:
    """From now on what is compiled is kept and found again as this module says. To be called before jax compiles.

    A run of one process in a local work folder needs nothing but jax's own cache. JAX_COMPILATION_CACHE_DIR names
    another folder, shared by several runs: under gs:// instead of the one beside the work folder, on a disk instead of
    the user's own.
    """
    own = environment()[DIRECTORY]
    chosen = os.environ.get(DIRECTORY, own)
    is_shared = paths.is_remote(workdir) or distributed.global_state.client is not None
    if not config.enable_compilation_cache.value:
        return
    far, make = None, jax_cache
    if is_shared or paths.is_remote(chosen):
        if chosen == own:
            far = paths.absolute(workdir) / "compiled"
        elif paths.is_remote(chosen):
            far = paths.as_path(chosen)
            jax.config.update("jax_compilation_cache_dir", own)
        is_first = distributed.global_state.process_id == 0
        make = lambda path: (Programs(pathlib.Path(path), far, is_first=is_first), path)
    if make is not compilation_cache.get_file_cache:
        compilation_cache.get_file_cache, compiler._cache_write = make, write_here
        public.reset_cache()  # a program that was compiled earlier has opened jax's own


def write_here(key: str, seconds: float, name: str, backend: Any, executable: Any, *callbacks: Any) -> None:
    """What jax does with a program it has compiled, in each process."""
    if distributed.global_state.process_id == 0:
        return write_as_the_first(key, seconds, name, backend, executable, *callbacks)
    if any(callbacks) or seconds < config.persistent_cache_min_compile_time_secs.value:
        return None
    try:
        compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
    except Exception as error:  # as jax does with its own: the program is there
        warnings.warn(f"{name} is not kept in the compilation cache: {type(error).__name__}: {error}", stacklevel=2)
    return None


class Programs:
    """A cache as jax asks it, over a folder of this machine and one that all processes can read."""

    def __init__(self, near: pathlib.Path, far: Any, *, is_first: bool):
        """far: None if there is none; local or remote. is_first: whether this process writes into it."""
        self.near, self.far, self.is_first = near, far, is_first
        self._path = near  # which jax names when it resets its cache

    def get(self, key: str) -> bytes | None:
        """The compiled program, or None."""
        try:
            return (self.near / f"{key}{ENDING}").read_bytes()
        except OSError:  # not there, or no disk to be had: then it is compiled
            pass
        try:
            sealed = paths.read_bytes(self.far / f"{key}{ENDING}") if self.far is not None else b""
        except FileNotFoundError:
            return None
        digest, program = sealed[:32], sealed[32:]
        if hashlib.sha256(program).digest() != digest:
            return None
        self.keep_near(key, program)
        return program

    def put(self, key: str, program: bytes) -> None:
        """Keeps a program that this process has compiled."""
        self.keep_near(key, program)
        if self.far is not None and self.is_first:
            if not paths.is_remote(self.far):
                paths.make_private(self.far)
            paths.write_bytes_atomic(self.far / f"{key}{ENDING}", hashlib.sha256(program).digest() + program)

    def keep_near(self, key: str, program: bytes) -> None:
        """Writes a program to this machine's disk, whole; where that cannot be, it is compiled or fetched again."""
        try:
            paths.make_private(self.near)
            paths.write_bytes_atomic(self.near / f"{key}{ENDING}", program)
        except OSError:
            pass
