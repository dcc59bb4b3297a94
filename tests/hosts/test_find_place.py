"""A process finds out which one it is from flags, from each kind of cluster, and never guesses from half of it."""

import http.server
import socket
import threading

import pytest

from jaxscale.runtime.hosts.discovery import discover_process, expand_counts, expand_nodes, query_instance, tpu_metadata

SLURM = dict(SLURM_JOB_ID="7", SLURM_NTASKS="4", SLURM_PROCID="2", SLURM_LOCALID="0", SLURM_NODEID="1",
             SLURM_STEP_NODELIST="gpu[009-010],big1", SLURM_STEP_TASKS_PER_NODE="2,1(x2)")  # fmt: skip
GKE = dict(TPU_WORKER_HOSTNAMES="a-0.svc,a-1.svc", TPU_WORKER_ID="1")
SLICES = GKE | dict(MEGASCALE_NUM_SLICES="2", MEGASCALE_SLICE_ID="1", MEGASCALE_COORDINATOR_ADDRESS="a-0.svc:8080")
JOBSET = dict(JAX_COORDINATOR_ADDRESS="job-0.svc:1234", JAX_NUM_PROCESSES="8", JOB_COMPLETION_INDEX="5")
METADATA = {
    "agent-worker-number": "3",
    "worker-network-endpoints": "u:8470:10.0.0.1,u:8470:10.0.0.2,u:8470:10.0.0.3,u:8470:10.0.0.4",
    "tpu-env": "ACCELERATOR_TYPE: 'v5p-32'\nWORKER_ID: '3'\n",
}


@pytest.mark.parametrize(
    ("env", "host", "port", "count", "number", "names"),
    [
        (JOBSET, "job-0.svc", 1234, 8, 5, ()),
        (JOBSET | {"JAX_PROCESS_ID": "6"}, "job-0.svc", 1234, 8, 6, ()),
        (GKE, "a-0.svc", 8482, 2, 1, ("a-0.svc", "a-1.svc")),
        (SLICES, "a-0.svc", 8482, 4, 3, ()),
        (SLURM, "gpu009", 61454, 4, 2, ("gpu009", "gpu009", "gpu010", "big1")),
        (SLURM | {"SLURM_DISTRIBUTION": "cyclic"}, "gpu009", 61454, 4, 2, ()),
    ],
)
def test_each_cluster_says_who_this_is(env, host, port, count, number, names):
    place = discover_process({}, env)
    assert (place.host, place.port, place.num_processes, place.process_id) == (host, port, count, number)
    assert place.names == names


def test_flags_come_before_the_cluster_and_one_process_may_be_asked_for():
    flags = {"coordinator": "[::1]:900", "num_processes": "3", "process_id": "1"}
    place = discover_process(flags, SLURM)
    assert (place.host, place.port, place.num_processes, place.process_id) == ("::1", 900, 3, 1)
    assert discover_process({"num_processes": "1"}, SLURM) is None


@pytest.mark.parametrize(
    "env",
    [{}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, {"TPU_WORKER_HOSTNAMES": "localhost"},
     {"TPU_WORKER_HOSTNAMES": "a", "TPU_WORKER_ID": "0"}, JOBSET | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}],
)  # fmt: skip
def test_one_process_alone_has_no_place(env):
    assert discover_process({}, env) is None


@pytest.mark.parametrize(
    ("flags", "env", "told"),
    [
        ({"coordinator": "a:1"}, {}, "--num_processes and --process_id must also be given"),
        ({"coordinator": "a", "num_processes": "2", "process_id": "0"}, {}, "--coordinator=a must be HOST:PORT"),
        ({"coordinator": "a:1", "num_processes": "2", "process_id": "2"}, {}, "process_id=2 .* must be 0 to 1"),
        ({"coordinator": "a:65535", "num_processes": "2", "process_id": "1"}, {}, "must be 1 to 65534"),
        ({"coordinator": "a:1", "num_processes": "two", "process_id": "1"}, {}, "must be a whole number"),
        ({}, {k: v for k, v in JOBSET.items() if "INDEX" not in k}, "JAX_PROCESS_ID and JOB_COMPLETION_INDEX are not"),
        ({}, {"TPU_WORKER_HOSTNAMES": "a,b"}, "set TPU_WORKER_ID"),
        ({}, GKE | {"MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_COORDINATOR_ADDRESS is not set"),
        ({}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "not started by srun"),
    ],
)
def test_half_of_what_is_needed_is_refused(flags, env, told):
    with pytest.raises(ValueError, match=told):
        discover_process(flags, env)


def test_gpus_of_a_node_are_divided_only_among_tasks_that_see_them_all():
    two_tasks = SLURM | {"SLURM_NODEID": "0", "SLURM_LOCALID": "1", "SLURM_PROCID": "1"}
    assert discover_process({}, two_tasks).local_device_ids == (1,)
    assert discover_process({}, two_tasks | {"CUDA_VISIBLE_DEVICES": "3"}).local_device_ids is None
    assert discover_process({}, two_tasks | {"CUDA_VISIBLE_DEVICES": "2,3"}).local_device_ids == (1,)
    assert discover_process({}, SLURM).local_device_ids is None  # alone on its node


@pytest.mark.parametrize(
    ("text", "names"),
    [("a", ["a"]), ("a,b-1", ["a", "b-1"]), ("n[08-11],m[1,3]", ["n08", "n09", "n10", "n11", "m1", "m3"])],
)
def test_slurms_lists_are_written_out(text, names):
    assert expand_nodes(text) == names


def test_slurms_counts_are_written_out():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


def test_a_tpu_vm_asks_its_metadata_server(monkeypatch):
    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = METADATA.get(self.path.rpartition("/")[2])
            known = text is not None and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write((text or "").encode() if known else b"")

        def log_message(self, *args):
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"127.0.0.1:{server.server_port}"
            place = discover_process({}, {}, lambda name: query_instance(address, f"attributes/{name}"))
            assert (place.host, place.num_processes, place.process_id) == ("10.0.0.1", 4, 3)
            assert place.name(2) == "process 2 of 4 (10.0.0.3)"
            assert query_instance(address, "attributes/nothing") is None
        finally:
            server.shutdown()
    assert (
        discover_process({}, {}, lambda name: query_instance(address, f"attributes/{name}")) is None
    )  # no server: no TPU VM


@pytest.mark.parametrize("answer", [b"220 no HTTP\r\n\r\n", b"Content-Length: 9\r\n\r\nab", b"\r\n\xff\xfe"], ids=str)
def test_what_answers_otherwise_is_no_metadata_server(answer):
    def serve():
        client, _ = server.accept()
        with client:
            client.recv(1 << 16)
            client.sendall(answer if answer.startswith(b"2") else b"HTTP/1.1 200 OK\r\n" + answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        assert query_instance(f"127.0.0.1:{server.getsockname()[1]}", "preempted") is None
        thread.join()


def test_where_no_tpu_is_no_server_is_asked():
    assert tpu_metadata({"JAX_PLATFORMS": "cpu"}) is None
