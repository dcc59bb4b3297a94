"""Environment of a process: standard streams, UTF-8, huge pages, JAX's platforms and compilation cache, open files, the
mode of new files.

JAX reads its variables when it is imported; `set_variables` updates one that is imported already. Either way before JAX
is asked for its devices.
"""

import contextlib
import errno
import io
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping

from jaxscale.system.exits import BadInput, tell
from jaxscale.system.open_files import raise_open_files
from jaxscale.system.paths import PRIVATE, cache_dir, make_private

ORDERED = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
CACHE_ENABLED = "JAX_ENABLE_COMPILATION_CACHE"
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # malloc asks for huge pages: the arrays of each step fault in less often


def environment() -> dict[str, str]:
    """The variables that prepare() sets where the user has not, and their values."""
    return {
        "GLIBC_TUNABLES": HUGE_PAGES,
        "JAX_COMPILATION_CACHE_DIR": str(cache_dir() / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # else small programs are left out
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


def open_standard_streams() -> None:
    """Opens the null device for each standard stream that is closed, as some service managers leave them.

    Otherwise Python has None in its place, and the next file that is opened takes its number: XLA, which logs to number
    2, would write into that file. Characters that the encoding of stdout lacks are written as escapes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def use_utf8() -> None:
    """Starts the process again in Python's UTF-8 mode where the locale has another encoding.

    File names, logs and the output of other programs are UTF-8 then, as TensorStore takes names in any locale.
    """
    if (encoding := sys.getfilesystemencoding()) == "utf-8":
        return
    if os.environ.get("PYTHONUTF8") == "1":
        raise BadInput(f"Python has {encoding} file names though PYTHONUTF8=1; leave out its flags -E, -I, -X")
    os.environ["PYTHONUTF8"] = "1"
    start_again()


def start_again() -> None:
    """Starts the process again, with the same arguments, to read its environment again."""
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prepare() -> None:
    """Sets jax's environment for a program of ours. What the user has set already is left alone."""
    use_huge_pages()  # may start the process again: first, so that nothing is said twice
    raise_open_files()
    keep_compiled_programs()
    order_collectives()


def order_collectives() -> None:
    """Keeps programs for several simulated devices from standing still on XLA:CPU.

    By default it schedules for concurrency: two collectives of a program that do not depend on each other may begin in
    another order on each device, which waits for the rest for ever; after 40 s XLA's "rendezvous" ends the process (8
    devices on 2 cores, jax 0.10.2: 5 of 23 small runs, with 2 to 256 threads). Scheduled for memory, 60 of 60
    runs ended well.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if simulated_devices() > 1 and "xla_cpu_scheduler_type" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {ORDERED}"


def simulated_devices() -> int:
    """Returns the number of simulated CPU devices in XLA_FLAGS, 1 by default."""
    numbers = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(numbers[-1]) if numbers else 1


def prepare_ahead() -> None:
    """Sets jax's environment for a program that compiles for devices which are not here, and touches none that are.

    The CPU is jax's only platform, whatever the user has set for training: a client of a TPU or GPU would take the
    device. jax's compilation cache is off, for what it keeps of such programs cannot be read back.
    """
    set_variables({"JAX_PLATFORMS": "cpu", CACHE_ENABLED: "false"})


def set_variables(wanted: Mapping[str, str]) -> None:
    """Sets environment variables of JAX, and where JAX is imported already the options that it read from them."""
    os.environ.update(wanted)
    if "jax" in sys.modules:
        for name, text in wanted.items():
            value = {"false": False, "0": 0}.get(text, text)
            sys.modules["jax"].config.update(name.lower(), value)


def keep_compiled_programs() -> None:
    """Turns on jax's compilation cache, in the user's cache folder: the second start of a run compiles nothing.

    Warns and leaves the cache off if that folder cannot be created or written. Several simulated CPU devices have no
    cache unless JAX_ENABLE_COMPILATION_CACHE is set: a program that XLA:CPU loads does not order the collectives in
    loops and branches with those outside, and two of them may join one rendezvous (jaxlib 0.10.2, 0.11.2, 0.12.0). Of
    48 small pipeline runs that loaded their step 9 had wrong losses and 4 aborted; all 18 that compiled it were equal.
    """
    if simulated_devices() > 1 and not has_accelerator() and CACHE_ENABLED not in os.environ:
        set_variables({CACHE_ENABLED: "false"})
        return
    wanted = {name: value for name, value in environment().items() if name.startswith("JAX_")}
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = pathlib.Path(wanted["JAX_COMPILATION_CACHE_DIR"])
        try:
            make_private(folder.parent)
            folder.mkdir(exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            cause = error.strerror or error
            tell(f"compiled programs are not kept: {folder}: {cause}; set XDG_CACHE_HOME")
            return
    set_variables({name: value for name, value in wanted.items() if name not in os.environ})


def use_huge_pages() -> None:
    """Starts the process again with huge pages for malloc, where jax will run on a Linux CPU.

    glibc reads GLIBC_TUNABLES once, when a process starts. JAXSCALE_HUGE_PAGES=0 leaves it out. Worth 6 to 15% of the
    tokens/s of `bench step --spec=T` in four turns (2 cores, jax 0.10.2, 2026-11-23).
    """
    if not sys.platform.startswith("linux") or os.environ.get("JAXSCALE_HUGE_PAGES", "1") == "0":
        return
    if "GLIBC_TUNABLES" in os.environ or has_accelerator():
        return
    os.environ["GLIBC_TUNABLES"] = environment()["GLIBC_TUNABLES"]
    start_again()


def has_huge_pages() -> bool:
    """True if malloc asks for huge pages in this process, by us or by the user."""
    return "hugetlb" in os.environ.get("GLIBC_TUNABLES", "")


def folder_mode(text: str | None) -> int:
    """The mode that --run_dir_mode names; 0700 without it. Raises BadInput for one that shuts out the owner."""
    if text is None:
        return PRIVATE
    if not re.fullmatch("0?7[0-7][0-7]", text):
        raise BadInput(
            f"--run_dir_mode={text} must be an octal mode that leaves everything to the owner, such as 0700 or 0750"
        )
    return int(text, 8)


@contextlib.contextmanager
def files_as(mode: int) -> Iterator[None]:
    """Every file and folder made inside is as closed to others as a folder of this mode; libraries' files as well."""
    old = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(old)


def has_accelerator() -> bool:
    """True if jax is likely to find one: asked of the file system, since asking jax would start it."""
    chosen = os.environ.get("JAX_PLATFORMS", "")
    if chosen:
        return chosen.split(",")[0] != "cpu"
    return any(os.path.exists(path) for path in ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0", "/dev/kfd"))
