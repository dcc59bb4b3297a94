"""The JobSets that launch/gke/jobset.sh renders: sound, the right size, and restarted on the right exit codes.

The structure held here is that of the published CRD, jobset.x-k8s.io/v1alpha2 (kubernetes-sigs/jobset,
config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml). Where JAXSCALE_JOBSET_CRD names a copy of that file, the
whole manifest is also held against its schema, unknown fields refused.
"""

import copy
import os
import re

import pytest
import yaml
from scripts import manifest, printed

from jaxscale.system.exits import Exit

TRAINING = ("--config=configs/7b.py", '--config.data.files=a "b"\\c #1: ${NAME} $HOME & *.txt', "--workdir=gs://b/7b")
COMMON = ("--name=seven", "--image=registry/jaxscale:1")
RESTARTED = {
    Exit.DONE,
    Exit.PREEMPTED,
    Exit.PEER_LOST,
    Exit.STORAGE,
    Exit.HANG,
}  # jaxscale.system.exits: a supervisor may
# What may stand where, of what is used here; a name out of place is dropped in silence or refused by the server.
FIELDS = {
    "spec": {"failurePolicy", "network", "replicatedJobs"},
    "failurePolicy": {"maxRestarts", "rules"},
    "network": {"enableDNSHostnames"},
    "replicated job": {"name", "replicas", "template"},
    "job": {"parallelism", "completions", "completionMode", "backoffLimit", "podFailurePolicy", "template"},
    "pod": {"restartPolicy", "terminationGracePeriodSeconds", "hostNetwork", "dnsPolicy", "nodeSelector", "containers",
            "volumes"},
    "container": {"name", "image", "args", "env", "securityContext", "resources", "volumeMounts"},
}  # fmt: skip


def render(topology, *options):
    return manifest(*COMMON, f"--topology={topology}", *options, "--", *TRAINING)


def job_of(jobset):
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod_of(jobset):
    return job_of(jobset)["template"]["spec"]


def container_of(jobset):
    (container,) = pod_of(jobset)["containers"]
    return container


@pytest.mark.parametrize("topology", ["v6e:4x4", "h100:4x8"])
def test_each_field_stands_where_the_published_schema_has_it(topology):
    jobset = render(topology)
    assert set(jobset) == {"apiVersion", "kind", "metadata", "spec"}
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = jobset["spec"]
    found = {
        "spec": spec,
        "failurePolicy": spec["failurePolicy"],
        "network": spec.get("network", {}),
        "replicated job": spec["replicatedJobs"][0],
        "job": job_of(jobset),
        "pod": pod_of(jobset),
        "container": container_of(jobset),
    }
    assert {where: set(fields) - FIELDS[where] for where, fields in found.items()} == {where: set() for where in found}


@pytest.mark.parametrize(
    ("topology", "options", "slices", "hosts", "chips", "label"),
    [
        ("v6e:16x16", ["--slices=2"], 2, 64, 4, "tpu-v6e-slice"),
        ("v5p:4x4x8", [], 1, 32, 4, "tpu-v5p-slice"),
        ("v5e:4x8", ["--slices=3"], 3, 8, 4, "tpu-v5-lite-podslice"),
        ("v5e:1x1", [], 1, 1, 1, "tpu-v5-lite-podslice"),
        ("v6e:2x4", ["--chips-per-host=8"], 1, 1, 8, "tpu-v6e-slice"),
        ("v4:2x2x4", [], 1, 4, 4, "tpu-v4-podslice"),
    ],
)
def test_a_tpu_slice_is_one_job_with_a_pod_for_each_host(topology, options, slices, hosts, chips, label):
    jobset = render(topology, *options)
    assert jobset["spec"]["replicatedJobs"][0]["replicas"] == slices
    assert (job_of(jobset)["parallelism"], job_of(jobset)["completions"]) == (hosts, hosts)
    assert container_of(jobset)["resources"]["limits"] == {"google.com/tpu": chips}
    assert pod_of(jobset)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology.partition(":")[2],
    }
    # a slice is a node pool, and two Jobs in one pool would wait for each other for ever
    topology_key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert jobset["metadata"]["annotations"][topology_key] == "cloud.google.com/gke-nodepool"


def test_gpu_nodes_are_told_their_coordinator_and_number():
    jobset = render("h100:4x8")
    container = container_of(jobset)
    assert container["args"] == [
        *TRAINING, "--coordinator=seven-node-0-0.seven:8476", "--num_processes=4", "--process_id=$(PROCESS_ID)",
    ]  # fmt: skip
    (index,) = container["env"]
    assert index["name"] == "PROCESS_ID"
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert index["valueFrom"]["fieldRef"]["fieldPath"] == path
    # what the coordinator is called: JobSet, replicated job, index of the Job, index of the pod, and its subdomain
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True
    assert jobset["spec"]["replicatedJobs"][0]["name"] == "node" and job_of(jobset)["completionMode"] == "Indexed"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod_of(jobset)["volumes"]}


def test_one_gpu_node_is_told_of_no_others():
    assert container_of(render("a100:1x8"))["args"] == list(TRAINING)


@pytest.mark.parametrize("topology", ["v6e:4x4", "h100:4x8"])
def test_only_codes_that_another_try_may_mend_start_the_run_again(topology):
    jobset = render(topology, "--max-restarts=7")
    job, policy = job_of(jobset), jobset["spec"]["failurePolicy"]
    (rule,) = job["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]["values"]
    assert set(codes) == set(Exit) - RESTARTED
    assert codes == sorted(codes) and rule["onExitCodes"]["operator"] == "In" and rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == container_of(jobset)["name"]
    # a Job failed by that rule has this reason; any other failure restarts all Jobs
    (end,) = policy["rules"]
    assert (end["action"], end["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", end["name"])
    assert policy["maxRestarts"] == 7 and job["backoffLimit"] == 0
    assert pod_of(jobset)["restartPolicy"] == "Never"  # podFailurePolicy is refused with any other


@pytest.mark.parametrize("topology", ["v6e:4x4", "h100:1x8"])
def test_arguments_reach_the_container_as_they_were_typed(topology):
    assert container_of(render(topology))["args"] == list(TRAINING)


def test_apply_shows_the_manifest_it_would_give_to_kubectl():
    text = printed("gke/jobset.sh", "apply", *COMMON, "--topology=v6e:4x4", "--dry-run", "--", *TRAINING)
    first, *lines, last = text.splitlines()
    assert first == "kubectl apply -f - <<'YAML'" and last == "YAML"
    assert yaml.safe_load("\n".join(lines)) == render("v6e:4x4")


def closed(schema):
    """The schema of a CRD with unknown fields refused, as `kubectl apply --validate=strict` refuses them."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: closed(part) for name, part in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    return schema


@pytest.mark.parametrize("topology", ["v6e:4x4", "h100:4x8", "h100:1x8"])
def test_the_published_schema_accepts_it(topology):
    jsonschema = pytest.importorskip("jsonschema")  # comes with nbclient
    if (path := os.environ.get("JAXSCALE_JOBSET_CRD")) is None:
        pytest.skip("set JAXSCALE_JOBSET_CRD to a copy of jobset.x-k8s.io_jobsets.yaml")
    with open(path) as file:
        (version,) = yaml.safe_load(file)["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    check = jsonschema.Draft7Validator(closed(schema))
    jobset = render(topology)
    assert [error.message for error in check.iter_errors(jobset)] == []
    broken = copy.deepcopy(jobset)
    job_of(broken)["backofLimit"] = job_of(broken).pop("backoffLimit")
    assert "backofLimit" in next(check.iter_errors(broken)).message
