#!/usr/bin/env bash
# The same run through xpk, Google's tool that makes GKE clusters of TPUs and gives work to them.

set -euo pipefail

usage() {
  cat <<'TEXT'
xpk.sh VERB --cluster=C --project=P --zone=Z [OPTION ...] [-- ARGUMENT ...]

  cluster   makes a cluster with its node pools         needs --tpu-type and one of --spot, --on-demand, --reservation=R
  run       gives a training run to it                  needs --tpu-type, --name, --image and ARGUMENT
  list      the workloads of the cluster
  delete    deletes a workload (--name)
  remove    deletes the cluster

  --tpu-type=T          v5litepod-256, v5p-256, v6e-256 ..., in xpk's words
  --slices=N            default 1
  --name=NAME           of the workload
  --image=IMAGE         made by launch/docker/build.sh and pushed to a registry
  --max-restarts=N      default 100
  --dry-run             prints the exact commands and runs nothing

  launch/gke/xpk.sh cluster --cluster=c --project=p --zone=us-east5-b --tpu-type=v6e-256 --slices=2 --spot
  launch/gke/xpk.sh run --cluster=c --project=p --zone=us-east5-b --tpu-type=v6e-256 --slices=2 --name=seven \
      --image=REGISTRY/jaxscale:tpu -- --config=configs/7b.py --workdir=gs://BUCKET/7b

xpk is installed with pip install xpk, and needs gcloud and kubectl.
TEXT
}

fail() {
  echo "error: $*" >&2
  exit 2
}

cluster="" project="" zone="" tpu_type="" slices=1 name="" image="" max_restarts=100 capacity=() dry=""

verb="${1:---help}"
shift || true
case "$verb" in
  -h | --help) usage && exit 0 ;;
  cluster | run | list | delete | remove) ;;
  *) fail "no verb $verb; it has cluster, run, list, delete, remove" ;;
esac
while [[ $# -gt 0 ]]; do
  case "$1" in
    --cluster=*) cluster="${1#*=}" ;;
    --project=*) project="${1#*=}" ;;
    --zone=*) zone="${1#*=}" ;;
    --tpu-type=*) tpu_type="${1#*=}" ;;
    --slices=*) slices="${1#*=}" ;;
    --name=*) name="${1#*=}" ;;
    --image=*) image="${1#*=}" ;;
    --max-restarts=*) max_restarts="${1#*=}" ;;
    --spot | --on-demand | --reservation=*) capacity+=("$1") ;;
    --dry-run) dry=1 ;;
    -h | --help) usage && exit 0 ;;
    --) shift && break ;;
    *) fail "$1 is no option of xpk.sh; what belongs to the training comes after -- (--help lists the options)" ;;
  esac
  shift
done
for given in cluster project zone; do
  [[ -n ${!given} ]] || fail "--$given is missing"
done
where=("--cluster=$cluster" "--project=$project" "--zone=$zone")

# Fails if an option that the verb needs is missing.
needs() {
  local option variable
  for option in "$@"; do
    variable="${option//-/_}"
    [[ -n ${!variable} ]] || fail "$verb needs --$option"
  done
}

# Runs a command, or under --dry-run prints it as it could be typed.
run() {
  if [[ -n $dry ]]; then
    printf '%q ' "$@" && echo
  else
    "$@"
  fi
}

case "$verb" in
  cluster)
    needs tpu-type
    [[ ${#capacity[@]} -eq 1 ]] || fail "cluster needs one of --spot, --on-demand, --reservation=R"
    run xpk cluster create "${where[@]}" "--tpu-type=$tpu_type" "--num-slices=$slices" "${capacity[@]}"
    ;;
  run)
    needs tpu-type name image
    [[ $# -gt 0 ]] || fail "nothing to train; give at least: -- --config=FILE --workdir=gs://BUCKET/RUN"
    # xpk restarts at death by signal by itself; 10, 13, 14 and 15 are jaxscale's own codes that are worth another try
    run xpk workload create "${where[@]}" "--tpu-type=$tpu_type" "--num-slices=$slices" "--workload=$name" \
      "--docker-image=$image" "--max-restarts=$max_restarts" --restart-on-exit-codes=10,13,14,15 \
      --termination-grace-period-seconds=600 "--command=python -m jaxscale.main$(printf ' %q' "$@")"
    ;;
  list) run xpk workload list "${where[@]}" ;;
  delete)
    needs name
    run xpk workload delete "${where[@]}" "--workload=$name"
    ;;
  remove) run xpk cluster delete "${where[@]}" ;;
esac
