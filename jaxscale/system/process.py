"""Process environment: standard streams, UTF-8, huge pages, JAX platforms and compilation cache, open files, umask.

JAX reads its variables at import; `set_variables` also updates JAX if it is already imported. Call it before JAX
initializes its devices.
"""

import contextlib
import errno
import io
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping

from jaxscale.system.exits import BadInput, print_stderr
from jaxscale.system.open_files import raise_open_files
from jaxscale.system.paths import cache_dir, make_private

ORDERED = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
CACHE_ENABLED = "JAX_ENABLE_COMPILATION_CACHE"
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # malloc uses huge pages, with fewer page faults for the arrays of each step


def environment() -> dict[str, str]:
    """Returns the variables that prepare() sets, unless the user has set them."""
    return {
        "GLIBC_TUNABLES": HUGE_PAGES,
        "JAX_COMPILATION_CACHE_DIR": str(cache_dir() / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # also caches small programs
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


def open_standard_streams() -> None:
    """Opens the null device for each closed standard stream. Some service managers close these streams.

    Otherwise, Python sets the stream to None, and the next file that is opened gets its descriptor. XLA logs to file
    descriptor 2, and would write to that file. Also lets stdout escape characters outside its encoding.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def use_utf8() -> None:
    """Restarts the process in Python's UTF-8 mode, if file names have a different encoding. TensorStore needs UTF-8."""
    if (encoding := sys.getfilesystemencoding()) == "utf-8":
        return
    if os.environ.get("PYTHONUTF8") == "1":
        raise BadInput(f"Python uses {encoding} for file names despite PYTHONUTF8=1; omit its flags -E, -I and -X")
    os.environ["PYTHONUTF8"] = "1"
    restart()


def restart() -> None:
    """Restarts the process with the same arguments and the changed environment."""
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prepare() -> None:
    """Sets JAX's environment, except for variables that the user has set."""
    use_huge_pages()  # first, since it may restart the process and would repeat messages
    raise_open_files()
    keep_compiled_programs()
    order_collectives()


def order_collectives() -> None:
    """Prevents deadlocks of collectives on several simulated devices (XLA:CPU).

    By default, XLA:CPU schedules for concurrency: independent collectives can start in a different order on each device
    and deadlock. XLA then ends the process after 40 s (8 devices on 2 cores, jax 0.10.2: 5 of 23 small runs, with 2 to
    256 threads). With the scheduler for memory, 60 of 60 runs completed.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if simulated_devices() > 1 and "xla_cpu_scheduler_type" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {ORDERED}"


def simulated_devices() -> int:
    """Returns the number of simulated CPU devices in XLA_FLAGS, by default 1."""
    numbers = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(numbers[-1]) if numbers else 1


def prepare_ahead() -> None:
    """Sets JAX's environment for ahead-of-time compilation for other devices, without using local accelerators.

    The only platform is the CPU, even if the user has selected another, because a TPU or GPU client would occupy the
    device. The compilation cache is off, because cached programs for other devices cannot be loaded.
    """
    set_variables({"JAX_PLATFORMS": "cpu", CACHE_ENABLED: "false"})


def set_variables(variables: Mapping[str, str]) -> None:
    """Sets environment variables of JAX, and the corresponding options if JAX is already imported."""
    os.environ.update(variables)
    if "jax" in sys.modules:
        for name, text in variables.items():
            value = {"false": False, "0": 0}.get(text, text)
            sys.modules["jax"].config.update(name.lower(), value)


def keep_compiled_programs() -> None:
    """Enables JAX's compilation cache in the user's cache folder, so that the second start of a run compiles nothing.

    Warns and leaves the cache off if the folder is not writable. With several simulated CPU devices, the cache is off
    unless JAX_ENABLE_COMPILATION_CACHE is set. In a program loaded from the cache, XLA:CPU does not order collectives
    in loops and branches relative to other collectives, and two of them may join the same rendezvous (jaxlib 0.10.2,
    0.11.2, 0.12.0). Of 48 small pipeline runs with a cached step, 9 had wrong losses and 4 aborted.
    """
    if simulated_devices() > 1 and not has_accelerator() and CACHE_ENABLED not in os.environ:
        set_variables({CACHE_ENABLED: "false"})
        return
    variables = {name: value for name, value in environment().items() if name.startswith("JAX_")}
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = pathlib.Path(variables["JAX_COMPILATION_CACHE_DIR"])
        try:
            make_private(folder.parent)
            folder.mkdir(exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            cause = error.strerror or error
            print_stderr(f"compiled programs are not cached, because of {folder}: {cause}; set XDG_CACHE_HOME")
            return
    set_variables({name: value for name, value in variables.items() if name not in os.environ})


def use_huge_pages() -> None:
    """Restarts the process with huge pages for malloc if JAX will run on a Linux CPU.

    glibc reads GLIBC_TUNABLES once, when a process starts. JAXSCALE_HUGE_PAGES=0 disables huge pages. They increased
    the tokens/s of `bench step --spec=T` by 6 to 15% in four runs (2 cores, jax 0.10.2, 2026-11-23).
    """
    if not sys.platform.startswith("linux") or os.environ.get("JAXSCALE_HUGE_PAGES", "1") == "0":
        return
    if "GLIBC_TUNABLES" in os.environ or has_accelerator():
        return
    os.environ["GLIBC_TUNABLES"] = environment()["GLIBC_TUNABLES"]
    restart()


def has_huge_pages() -> bool:
    """Returns True if this module or the user has enabled huge pages for malloc in this process."""
    return "hugetlb" in os.environ.get("GLIBC_TUNABLES", "")


def folder_mode(text: str) -> int:
    """Parses --run_dir_mode. Raises BadInput if the mode does not give the owner full access."""
    if not re.fullmatch("0?7[0-7][0-7]", text):
        raise BadInput(
            f"--run_dir_mode={text} must be an octal mode that gives the owner full access, such as 0700 or 0750"
        )
    return int(text, 8)


@contextlib.contextmanager
def files_as(mode: int) -> Iterator[None]:
    """Sets the umask in the block, so that all new files, even those of libraries, have at most these permissions."""
    old = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(old)


def has_accelerator() -> bool:
    """Returns True if JAX is likely to find an accelerator. Checks device files, and does not initialize devices."""
    chosen = os.environ.get("JAX_PLATFORMS", "")
    if chosen:
        return chosen.split(",")[0] != "cpu"
    return any(os.path.exists(path) for path in ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0", "/dev/kfd"))
