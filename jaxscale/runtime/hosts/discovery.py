"""Process discovery from flags or the cluster, and shutdown notices from the cloud's metadata server."""

import dataclasses
import http.client
import os
import re
import threading
import urllib.request
from collections.abc import Callable, Mapping

from jaxscale.settings.command_line import flag, flags_of
from jaxscale.system.exits import BadInput

TPU_PORT = 8482  # jax's port on TPU slices, which their firewalls allow
METADATA_SECONDS = 5
POLL_SECONDS = 5.0
# {attribute: prefix of a value that announces the shutdown}. Live migration is not a shutdown.
ENDS = {"preempted": "TRUE", "maintenance-event": "TERMINATE"}
TPU_FILES = ("/dev/accel0", "/dev/vfio/0")  # a machine with a TPU has one of these files
WAY_OUT = "or set all of --coordinator=HOST:PORT --num_processes=N --process_id=I"


@dataclasses.dataclass(frozen=True)
class HostFlags:
    """Flags of a command that runs as several processes."""

    coordinator: str | None = flag(
        None, "with several processes: address of process 0, which also uses the next port", "HOST:PORT"
    )
    num_processes: str | None = flag(None, "number of processes; 1: a single process, even on a cluster", "N")
    process_id: str | None = flag(
        None, "index of this process, from 0; all three are detected on TPU slices, Slurm and GKE", "I"
    )
    roll_call_seconds: str | None = flag(
        None, "seconds for which process 0 waits for the others; default: 300 up to 16 processes, 720 for 1,536", "S"
    )


FLAGS = tuple(flags_of(HostFlags))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """One process of a run. The JAX coordinator listens on host:port, and the roll call on port + 1."""

    host: str
    port: int
    num_processes: int
    process_id: int
    found_in: str  # source of this information
    names: tuple[str, ...] = ()  # hosts of the processes, if known
    local_device_ids: tuple[int, ...] | None = None  # GPUs of this process; None: all visible GPUs

    def __post_init__(self):
        if not 0 <= self.process_id < self.num_processes:
            raise BadInput(
                f"process_id={self.process_id} (from {self.found_in}) must be 0 to {self.num_processes - 1}, "
                f"because num_processes={self.num_processes}"
            )
        if not 0 < self.port < 65535:
            raise BadInput(f"port {self.port} of the coordinator (from {self.found_in}) must be 1 to 65534")

    @property
    def is_first(self) -> bool:
        """True for process 0, the coordinator."""
        return self.process_id == 0

    def name(self, process_id: int, host: str | None = None) -> str:
        """Returns 'process 3 of 4 (node7)', with the host if known."""
        host = host or (self.names[process_id] if process_id < len(self.names) else None)
        host = host or (self.host if process_id == 0 else None)
        return f"process {process_id} of {self.num_processes}" + (f" ({host})" if host else "")


def discover_process(
    flags: Mapping[str, str], env: Mapping[str, str] = os.environ, metadata: Callable[[str], str | None] | None = None
) -> ProcessInfo | None:
    """Returns the address and index of this process, or None if the run has a single process.

    Sources in order: flags; JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID (or JobSet's
    JOB_COMPLETION_INDEX); GKE's TPU variables; Slurm; the metadata server of a Cloud TPU.
    metadata: function that returns the text of a Cloud TPU VM attribute or None; default: tpu_metadata(env).
    Raises BadInput for incomplete or contradictory information.
    """
    found = from_flags(flags)
    for find in (from_jax_variables, from_tpu_variables, from_slurm):
        found = find(env) if found is None else found
    if found is None and (metadata := metadata or tpu_metadata(env)):
        found = from_metadata(metadata)
    return found if found and found.num_processes > 1 else None


def from_flags(flags: Mapping[str, str]) -> ProcessInfo | None:
    """Reads --coordinator, --num_processes and --process_id; --num_processes=1 alone means a single process."""
    given = {name: flags[name] for name in FLAGS[:3] if name in flags}
    if not given:
        return None
    count = parse_number("--num_processes", given["num_processes"]) if "num_processes" in given else None
    if count == 1:
        return ProcessInfo(host="localhost", port=TPU_PORT, num_processes=1, process_id=0, found_in="flags")
    missing = [f"--{name}" for name in FLAGS[:3] if name not in given]
    if missing or count is None:
        raise BadInput(f"{' and '.join(missing)} must also be given; {', '.join(f'--{n}' for n in given)} alone cannot "
                         "connect the processes")  # fmt: skip
    host, port = split_address("--coordinator", given["coordinator"])
    process_id = parse_number("--process_id", given["process_id"])
    return ProcessInfo(host=host, port=port, num_processes=count, process_id=process_id, found_in="flags")


def from_jax_variables(env: Mapping[str, str]) -> ProcessInfo | None:
    """Reads JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, and JAX_PROCESS_ID or JOB_COMPLETION_INDEX."""
    address = env.get("JAX_COORDINATOR_ADDRESS")
    count, index = env.get("JAX_NUM_PROCESSES"), env.get("JAX_PROCESS_ID", env.get("JOB_COMPLETION_INDEX"))
    if not address or not count:
        return None
    if index is None:
        raise BadInput("JAX_COORDINATOR_ADDRESS is set, but JAX_PROCESS_ID and JOB_COMPLETION_INDEX are not; "
                         f"set JAX_PROCESS_ID, {WAY_OUT}")  # fmt: skip
    host, port = split_address("JAX_COORDINATOR_ADDRESS", address)
    return ProcessInfo(
        host=host,
        port=port,
        num_processes=parse_number("JAX_NUM_PROCESSES", count),
        process_id=parse_number("JAX_PROCESS_ID or JOB_COMPLETION_INDEX", index),
        found_in="JAX_COORDINATOR_ADDRESS",
    )


def from_tpu_variables(env: Mapping[str, str]) -> ProcessInfo | None:
    """Reads the variables of a GKE TPU pod: TPU_WORKER_HOSTNAMES, TPU_WORKER_ID, MEGASCALE_* for several slices."""
    workers = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES")
    if not workers:
        return None
    if "TPU_WORKER_ID" not in env:
        if "," not in workers and "MEGASCALE_NUM_SLICES" not in env:
            return None  # one host
        raise BadInput(f"TPU_WORKER_HOSTNAMES lists several hosts; set TPU_WORKER_ID, {WAY_OUT}")
    return from_tpu_workers(workers, env["TPU_WORKER_ID"], env.get, "TPU_WORKER_HOSTNAMES")


def from_metadata(metadata: Callable[[str], str | None]) -> ProcessInfo | None:
    """Reads the attributes of a Cloud TPU VM: workers, worker number and slice."""
    workers, index = metadata("worker-network-endpoints"), metadata("agent-worker-number")
    if not workers or index is None:
        return None
    variables = dict(re.findall(r"^\s*(\w+):\s*'?(.*?)'?\s*$", metadata("tpu-env") or "", re.MULTILINE))
    return from_tpu_workers(workers, index, variables.get, "the metadata of this TPU VM")


def from_tpu_workers(workers: str, index: str, variable: Callable[[str], str | None], found_in: str) -> ProcessInfo:
    """Returns the process of worker `index` in its slice. Every slice has the same number of workers."""
    hosts = [worker_host(worker) for worker in workers.split(",")]
    slices = parse_number("MEGASCALE_NUM_SLICES", variable("MEGASCALE_NUM_SLICES") or "1")
    slice_id = parse_number("MEGASCALE_SLICE_ID", variable("MEGASCALE_SLICE_ID") or "0")
    first = variable("MEGASCALE_COORDINATOR_ADDRESS") if slices > 1 else None
    if slices > 1 and not first:
        raise BadInput(f"MEGASCALE_COORDINATOR_ADDRESS is not set, but there are {slices} TPU slices ({found_in}); "
                         f"set the variable, {WAY_OUT}")  # fmt: skip
    return ProcessInfo(
        host=worker_host(first) if first else hosts[0],
        port=TPU_PORT,
        num_processes=slices * len(hosts),
        process_id=slice_id * len(hosts) + parse_number("the worker's number", index),
        found_in=found_in,
        names=tuple(hosts) if slices == 1 else (),
    )


def worker_host(worker: str) -> str:
    """Returns the host of a TPU worker listed as 'host', 'host:port' or 'name:id:address'."""
    parts = worker.strip().split(":")
    return parts[2] if len(parts) == 3 else parts[0]


def from_slurm(env: Mapping[str, str]) -> ProcessInfo | None:
    """Reads the variables of srun. A single task uses all GPUs of its node; otherwise each task uses one GPU."""
    count = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS")
    if not env.get("SLURM_JOB_ID") or not count or parse_number("SLURM_NTASKS", count) == 1:
        return None
    nodes = env.get("SLURM_STEP_NODELIST")
    if not nodes or "SLURM_PROCID" not in env:
        raise BadInput(f"SLURM_NTASKS={count}, but this process was not started by srun; start it with srun, {WAY_OUT}")
    hosts, tasks = expand_nodes(nodes), expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = parse_number("SLURM_NODEID", env.get("SLURM_NODEID", "0"))
    shared = node < len(tasks) and tasks[node] > 1
    sees_one = len([gpu for gpu in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]) == 1
    in_blocks = env.get("SLURM_DISTRIBUTION", "block").startswith("block") and len(hosts) == len(tasks)
    local = parse_number("SLURM_LOCALID", env.get("SLURM_LOCALID", "0"))
    return ProcessInfo(
        host=hosts[0],
        port=61440
        + parse_number("SLURM_JOB_ID", env["SLURM_JOB_ID"]) % 2047 * 2,  # two ports, distinct from the next job's
        num_processes=parse_number("SLURM_NTASKS", count),
        process_id=parse_number("SLURM_PROCID", env["SLURM_PROCID"]),
        found_in="Slurm",
        names=tuple(host for host, n in zip(hosts, tasks) for _ in range(n)) if in_blocks else (),
        local_device_ids=(local,) if shared and not sees_one and "JAX_LOCAL_DEVICE_IDS" not in env else None,
    )


def expand_nodes(text: str) -> list[str]:
    """Expands Slurm's 'gpu[001-003,7],login1' to ['gpu001', 'gpu002', ...]."""
    names = []
    for prefix, ranges in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?", text):
        if not ranges:
            names.append(prefix)
        for part in filter(None, ranges.split(",")):
            first, _, last = part.partition("-")
            names += [f"{prefix}{n:0{len(first)}}" for n in range(int(first), int(last or first) + 1)]
    return names


def expand_counts(text: str) -> list[int]:
    """Expands Slurm's '2(x3),1' to [2, 2, 2, 1]."""
    return [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def split_address(name: str, text: str) -> tuple[str, int]:
    """Parses 'host:1234' or '[::1]:1234' as ('host', 1234)."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()):
        raise BadInput(f"{name}={text} must be HOST:PORT, such as 10.0.0.2:8476")
    return host.removeprefix("[").removesuffix("]"), int(port)


def parse_number(name: str, text: str) -> int:
    """Parses an integer of at least 0."""
    if not (text.isascii() and text.isdecimal()):
        raise BadInput(f"{name}={text} must be a whole number")
    return int(text)


def tpu_metadata(env: Mapping[str, str]) -> Callable[[str], str | None] | None:
    """Returns a function that reads metadata attributes on a Cloud TPU VM, or None on other machines."""
    server = metadata_server(env)
    return None if server is None else lambda attribute: query_instance(server, f"attributes/{attribute}")


def metadata_server(env: Mapping[str, str]) -> str | None:
    """Returns the address of the metadata server if this process uses the TPUs of a Cloud TPU VM, else None."""
    on_cpu = env.get("JAX_PLATFORMS", "tpu").split(",")[0] != "tpu"
    if on_cpu or os.path.exists("/dev/nvidia0") or "TPU_SKIP_MDS_QUERY" in env:
        return None
    return env.get("GCE_METADATA_IP", "metadata.google.internal") if any(map(os.path.exists, TPU_FILES)) else None


def query_instance(server: str, name: str) -> str | None:
    """Returns a metadata value of this virtual machine, or None if it is missing or no server answers."""
    url = f"http://{server}/computeMetadata/v1/instance/{name}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the address is local: no proxy
    try:
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with opener.open(request, timeout=METADATA_SECONDS) as answer:
            return answer.read().decode()
    except (OSError, http.client.HTTPException, UnicodeDecodeError):  # the last two: not a metadata server
        return None


class Maintenance:
    """Context manager that calls announce(cause) once, in a thread, when the machine is about to be stopped.

    Polls only on TPU machines, or if GCE_METADATA_HOST is set. The metadata server announces preemption and maintenance
    a minute in advance, and not every process receives SIGTERM.
    Ignores events that are announced at the first poll. Otherwise, a run that is restarted on a machine with a
    scheduled shutdown would exit repeatedly.
    """

    def __init__(
        self, announce: Callable[[str], None], env: Mapping[str, str] = os.environ, poll_seconds: float = POLL_SECONDS
    ):
        self.announce, self.poll_seconds = announce, poll_seconds
        self.server = env.get("GCE_METADATA_HOST") or metadata_server(env)
        self.stopped = threading.Event()

    def __enter__(self) -> "Maintenance":
        if self.server is not None:
            threading.Thread(target=self.work, args=(self.server,), name="maintenance", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopped.set()

    def work(self, server: str) -> None:
        """Polls the metadata server until it announces a new event."""
        known = announced(server)
        while not self.stopped.wait(self.poll_seconds):
            now = announced(server)
            if news := sorted(now - known):
                return self.announce(f"the machine is about to be stopped ({news[0]})")
            known = now


def announced(server: str) -> set[str]:
    """Returns the announced events, such as {'maintenance-event: TERMINATE_ON_HOST_MAINTENANCE'}."""
    answers = {name: query_instance(server, name) or "" for name in ENDS}
    return {f"{name}: {text.strip()}" for name, text in answers.items() if text.startswith(ENDS[name])}
