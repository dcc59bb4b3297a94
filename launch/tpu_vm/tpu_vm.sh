#!/usr/bin/env bash
# Requests a TPU slice as a queued resource and trains on all of its workers.

set -euo pipefail

usage() {
  cat <<'TEXT'
tpu_vm.sh VERB --name=NAME --zone=ZONE [OPTION ...] [-- ARGUMENT ...]

  create    request the slice (queued resource)         needs --accelerator
  wait      wait until the slice is active; fails if the request failed
  install   install jaxscale on every worker: this checkout's last commit, or --repo
  run       start python -m jaxscale.main ARGUMENT ... on every worker, in the background
  logs      follow the log of a worker                  --worker, default 0
  status    show the state of the slice and its workers
  stop      save and stop the run; keep the slice
  resume    resume the run: after a preemption, request the slice again, install and start; needs the options of create
            and run. With --watch, repeat until the run is complete
  delete    delete the slice

  --project=P           default: gcloud's project
  --accelerator=TYPE    gcloud's accelerator type: v4-32, v5litepod-16, v5p-256, v6e-64 ...
  --runtime=VERSION     VM image; default: depends on the accelerator
  --slices=N            request several slices of this type together; default 1
  --spot                cheaper, but may be preempted
  --repo=URL --ref=REF  install from a git repository that the workers can access, instead of copying
  --extras=LIST         default tpu,gcs
  --worker=K --slice=K  worker and slice of logs; default 0
  --watch               for resume
  --dry-run             print the commands without running them

  launch/tpu_vm/tpu_vm.sh create --name=seven --zone=us-east5-a --accelerator=v5p-32 --spot
  launch/tpu_vm/tpu_vm.sh wait --name=seven --zone=us-east5-a
  launch/tpu_vm/tpu_vm.sh install --name=seven --zone=us-east5-a
  launch/tpu_vm/tpu_vm.sh run --name=seven --zone=us-east5-a -- --config=configs/7b.py --workdir=gs://BUCKET/7b

The work folder of a run on several workers must be in gs://: local files are deleted with the slice.
TEXT
}

fail() {
  echo "error: $*" >&2
  exit 2
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
name="" zone="" project="" accelerator="" runtime="" slices=1 spot="" repo="" ref="" extras="tpu,gcs" worker=0 slice=0
watch="" dry="" poll_seconds="${JAXSCALE_POLL_SECONDS:-60}"

verb="${1:---help}"
shift || true
case "$verb" in
  -h | --help) usage && exit 0 ;;
  create | wait | install | run | logs | status | stop | resume | delete) ;;
  *) fail "unknown verb $verb; use create, wait, install, run, logs, status, stop, resume or delete" ;;
esac
while [[ $# -gt 0 ]]; do
  case "$1" in
    --name=*) name="${1#*=}" ;;
    --zone=*) zone="${1#*=}" ;;
    --project=*) project="${1#*=}" ;;
    --accelerator=*) accelerator="${1#*=}" ;;
    --runtime=*) runtime="${1#*=}" ;;
    --slices=*) slices="${1#*=}" ;;
    --repo=*) repo="${1#*=}" ;;
    --ref=*) ref="${1#*=}" ;;
    --extras=*) extras="${1#*=}" ;;
    --worker=*) worker="${1#*=}" ;;
    --slice=*) slice="${1#*=}" ;;
    --spot) spot=1 ;;
    --watch) watch=1 ;;
    --dry-run) dry=1 ;;
    -h | --help) usage && exit 0 ;;
    --) shift && break ;;
    *) fail "unknown option $1; put training flags after -- (see --help)" ;;
  esac
  shift
done
arguments=("$@")

[[ -n $name ]] || fail "--name=NAME is missing; choose a name for the slice"
[[ -n $zone ]] || fail "--zone=ZONE is missing, such as --zone=us-east5-a"
[[ $slices =~ ^[1-9][0-9]*$ ]] || fail "--slices=$slices must be a positive integer"
[[ -z $ref || -n $repo ]] || fail "--ref=$ref needs --repo=URL; without --repo, the last commit of this checkout is copied"

where=("--zone=$zone")
[[ -z $project ]] || where+=("--project=$project")
nodes=("$name")
if [[ $slices -gt 1 ]]; then
  nodes=()
  for ((k = 0; k < slices; k++)); do nodes+=("$name-$k"); done
fi

# Runs a command, or prints it with --dry-run.
run() {
  if [[ -n $dry ]]; then
    printf '%q ' "$@" && echo
  else
    "$@"
  fi
}

# Calls a function for all slices in parallel; fails if it fails for any.
on_each_slice() {
  local node pid pids=() failed=0
  for node in "${nodes[@]}"; do
    if [[ -n $dry ]]; then
      "$@" "$node"
    else
      "$@" "$node" &
      pids+=($!)
    fi
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=$?; done
  return "$failed"
}

# worker.sh VERB ARGUMENT ... on all workers of one slice (the last argument), or on worker $1.
worker_sh() {
  local which="$1" node="${*: -1}"
  shift
  set -- "${@:1:$#-1}"
  run gcloud compute tpus tpu-vm ssh "$node" "${where[@]}" "--worker=$which" "--command=bash jaxscale-worker.sh$(printf ' %q' "$@")"
}

runtime_of() {
  case "$1" in
    v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5e-*) fail "--accelerator=$1: use gcloud's name, v5litepod-${1#v5e-}" ;;
    *) fail "--accelerator=$1 has no known image; set --runtime=VERSION" ;;
  esac
}

create() {
  [[ -n $accelerator ]] || fail "--accelerator=TYPE is missing, such as --accelerator=v5p-32"
  [[ -n $runtime ]] || runtime="$(runtime_of "$accelerator")"
  local what=("--node-id=$name")
  [[ $slices -eq 1 ]] || what=("--node-count=$slices" "--node-prefix=$name")
  [[ -z $spot ]] || what+=(--spot)
  run gcloud compute tpus queued-resources create "$name" "${where[@]}" \
    "--accelerator-type=$accelerator" "--runtime-version=$runtime" "${what[@]}"
}

listing=(gcloud compute tpus queued-resources list "${where[@]}" "--format=value(name.basename(),state.state)")

# Prints ACTIVE, SUSPENDED, WAITING_FOR_RESOURCES ..., or GONE if there is no such request. Fails if gcloud does.
state() {
  local seen
  seen="$("${listing[@]}")" || return
  awk -v name="$name" '$1 == name { found = $2 } END { print found ? found : "GONE" }' <<<"$seen"
}

wait_until_active() {
  if [[ -n $dry ]]; then
    run "${listing[@]}"
    echo "# repeated every $poll_seconds s until $name is ACTIVE"
    return
  fi
  local now last=""
  while true; do
    now="$(state)"
    [[ $now == "$last" ]] || echo "$name: $now"
    last="$now"
    case "$now" in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED | DELETING | GONE)
        echo "error: $name is $now and will not become ACTIVE; run tpu_vm.sh delete, then create" >&2
        return 1
        ;;
    esac
    sleep "$poll_seconds"
  done
}

install_on() {
  local files=("$here/worker.sh") source="$repo" node="$1"
  run gcloud compute tpus tpu-vm scp "${files[@]}" "$node:jaxscale-worker.sh" "${where[@]}" --worker=all
  if [[ -z $repo ]]; then
    run gcloud compute tpus tpu-vm scp "$archive" "$node:jaxscale.tar.gz" "${where[@]}" --worker=all
    source=jaxscale.tar.gz
  fi
  worker_sh all install "$source" "$ref" "$extras" "$node"
}

install() {
  archive=""
  if [[ -z $repo ]]; then
    archive="${TMPDIR:-/tmp}/jaxscale-$name-$$.tar.gz"
    if ! git -C "$root" diff --quiet HEAD; then
      echo "note: uncommitted changes in $root are not installed" >&2
    fi
    trap 'rm -f "$archive"' EXIT # also if a later command fails
    run git -C "$root" archive --format=tar.gz "--output=$archive" HEAD
  fi
  on_each_slice install_on
  [[ -z $archive ]] || run rm -f "$archive"
}

start() {
  [[ ${#arguments[@]} -gt 0 ]] || fail "no training flags; pass at least: -- --config=FILE --workdir=gs://BUCKET/RUN"
  on_each_slice worker_sh all start "${arguments[@]}"
}

delete() {
  run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
}

install_and_start() {
  install
  start
}

renew() {
  delete
  create
  wait_until_active
  install_and_start
}

# As in jaxscale.system.exits: saved on a signal, lost process, storage, hang; killed by a signal other than Ctrl-C or a
# closed pipe.
may_start_again() {
  case "$1" in
    10 | 13 | 14 | 15) return 0 ;;
    130 | 141) return 1 ;;
    *) [[ $1 -gt 128 && $1 -lt 193 ]] ;;
  esac
}

resume() {
  [[ -n $accelerator ]] || fail "--accelerator=TYPE is missing: resume may have to request the slice again"
  [[ ${#arguments[@]} -gt 0 ]] || fail "no training flags; pass those of run after --"
  if [[ -n $dry ]]; then
    echo "# if the slice is active:" && start
    echo "# if it was preempted or failed:" && renew
    return
  fi
  local now said
  while true; do
    # a slice that is being preempted does not respond; with --watch, the next iteration sees its state
    said=""
    now="$(state)" || now="state unknown (gcloud failed)"
    if [[ $now == ACTIVE ]]; then
      said="$(worker_sh 0 status "${nodes[0]}" | tail -n 1)" || said="no response from worker 0"
    fi
    echo "$name: $now${said:+, $said}"
    case "$now, $said" in
      "ACTIVE, running") ;;
      "ACTIVE, exit 0") return 0 ;;
      "ACTIVE, never started") install_and_start ;;
      "ACTIVE, no response"*) ;;
      "ACTIVE, exit "*)
        if ! may_start_again "${said#exit }"; then
          echo "error: the run ended with $said, which a restart does not fix; see tpu_vm.sh logs" >&2
          return 1
        fi
        start
        ;;
      "SUSPENDED, " | "FAILED, ") renew ;;
      "GONE, ")
        create
        wait_until_active
        install_and_start
        ;;
    esac
    [[ -n $watch ]] || return 0
    sleep "$poll_seconds"
  done
}

case "$verb" in
  create) create ;;
  wait) wait_until_active ;;
  install) install ;;
  run) start ;;
  logs) worker_sh "$worker" logs "${nodes[$slice]}" ;;
  status)
    run gcloud compute tpus queued-resources describe "$name" "${where[@]}" "--format=value(state.state)"
    on_each_slice worker_sh all status
    ;;
  stop) on_each_slice worker_sh all stop ;;
  resume) resume ;;
  delete) delete ;;
esac
