#!/usr/bin/env bash
# Trains through xpk, Google's tool that creates GKE clusters of TPUs and runs workloads on them.

set -euo pipefail

usage() {
  cat <<'TEXT'
xpk.sh VERB --cluster=C --project=P --zone=Z [OPTION ...] [-- ARGUMENT ...]

  cluster   create a cluster with its node pools        needs --tpu-type and one of --spot, --on-demand, --reservation=R
  run       start a training run on the cluster         needs --tpu-type, --name, --image and ARGUMENT
  list      list the workloads of the cluster
  delete    delete a workload (--name)
  remove    delete the cluster

  --tpu-type=T          xpk's TPU type: v5litepod-256, v5p-256, v6e-256 ...
  --slices=N            default 1
  --name=NAME           name of the workload
  --image=IMAGE         built by launch/docker/build.sh and pushed to a registry
  --max-restarts=N      default 100
  --dry-run             print the commands without running them

  launch/gke/xpk.sh cluster --cluster=c --project=p --zone=us-east5-b --tpu-type=v6e-256 --slices=2 --spot
  launch/gke/xpk.sh run --cluster=c --project=p --zone=us-east5-b --tpu-type=v6e-256 --slices=2 --name=seven \
      --image=REGISTRY/jaxscale:tpu -- --config=configs/7b.py --workdir=gs://BUCKET/7b

Install xpk with pip install xpk; it needs gcloud and kubectl.
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
  *) fail "unknown verb $verb; use cluster, run, list, delete or remove" ;;
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
    *) fail "unknown option $1; put training flags after -- (see --help)" ;;
  esac
  shift
done
for given in cluster project zone; do
  [[ -n ${!given} ]] || fail "--$given is missing"
done
where=("--cluster=$cluster" "--project=$project" "--zone=$zone")

# Fails if a required option of the verb is missing.
needs() {
  local option variable
  for option in "$@"; do
    variable="${option//-/_}"
    [[ -n ${!variable} ]] || fail "$verb needs --$option"
  done
}

# Runs a command, or prints it with --dry-run.
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
    [[ $# -gt 0 ]] || fail "no training flags; pass at least: -- --config=FILE --workdir=gs://BUCKET/RUN"
    # xpk itself restarts after a signal; 10, 13, 14 and 15 are jaxscale's exit codes that allow a restart
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
