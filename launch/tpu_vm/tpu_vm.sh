#!/usr/bin/env bash
# A TPU slice as a queued resource, and a training run on all of its workers.

set -euo pipefail

usage() {
  cat <<'TEXT'
tpu_vm.sh VERB --name=NAME --zone=ZONE [OPTION ...] [-- ARGUMENT ...]

  create    queues a request for the slice              needs --accelerator
  wait      returns when the slice is there, fails when it cannot come
  install   jaxscale on every worker: this checkout's last commit, or --repo
  run       python -m jaxscale.main ARGUMENT ... on every worker, in the background
  logs      follows the log of a worker                 --worker, default 0
  status    the slice's state, and every worker's
  stop      the run saves and leaves; the slice stays
  resume    brings a run back: after a preemption the slice is asked for again, installed and started; needs what create
            and run need. With --watch it keeps doing so until the run is done
  delete    gives the slice back

  --project=P           default: gcloud's own
  --accelerator=TYPE    v4-32, v5litepod-16, v5p-256, v6e-64 ... in gcloud's words
  --runtime=VERSION     the image; default: the one for that accelerator
  --slices=N            several slices of that type, as one request; default 1
  --spot                may be preempted, costs less
  --repo=URL --ref=REF  install from a git repository that the workers can read, instead of copying
  --extras=LIST         default tpu,gcs
  --worker=K --slice=K  whose log; default 0
  --watch               with resume
  --dry-run             prints the exact commands and runs nothing

  launch/tpu_vm/tpu_vm.sh create --name=seven --zone=us-east5-a --accelerator=v5p-32 --spot
  launch/tpu_vm/tpu_vm.sh wait --name=seven --zone=us-east5-a
  launch/tpu_vm/tpu_vm.sh install --name=seven --zone=us-east5-a
  launch/tpu_vm/tpu_vm.sh run --name=seven --zone=us-east5-a -- --config=configs/7b.py --workdir=gs://BUCKET/7b

The work folder of a run on several workers must be gs://: what lies on a worker goes with the slice.
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
  *) fail "no verb $verb; it has create, wait, install, run, logs, status, stop, resume, delete" ;;
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
    *) fail "$1 is no option of tpu_vm.sh; what belongs to the training comes after -- (--help lists the options)" ;;
  esac
  shift
done
arguments=("$@")

[[ -n $name ]] || fail "--name=NAME is missing: what the slice is to be called"
[[ -n $zone ]] || fail "--zone=ZONE is missing, such as --zone=us-east5-a"
[[ $slices =~ ^[1-9][0-9]*$ ]] || fail "--slices=$slices must be a number from 1"
[[ -z $ref || -n $repo ]] || fail "--ref=$ref needs --repo=URL; without it this checkout's last commit is copied"

where=("--zone=$zone")
[[ -z $project ]] || where+=("--project=$project")
nodes=("$name")
if [[ $slices -gt 1 ]]; then
  nodes=()
  for ((k = 0; k < slices; k++)); do nodes+=("$name-$k"); done
fi

# Runs a command, or under --dry-run prints it as it could be typed.
run() {
  if [[ -n $dry ]]; then
    printf '%q ' "$@" && echo
  else
    "$@"
  fi
}

# Calls a function for each slice at the same time, and fails if it failed for one.
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
    v5e-*) fail "--accelerator=$1: gcloud calls it v5litepod-${1#v5e-}" ;;
    *) fail "--accelerator=$1: its image is not known here; give --runtime=VERSION" ;;
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
    echo "# again every $poll_seconds s until $name is ACTIVE"
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
        echo "error: $name is $now and will not become ACTIVE; tpu_vm.sh delete, then create" >&2
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
      echo "note: uncommitted changes in $root are not copied" >&2
    fi
    trap 'rm -f "$archive"' EXIT # where the rest fails
    run git -C "$root" archive --format=tar.gz "--output=$archive" HEAD
  fi
  on_each_slice install_on
  [[ -z $archive ]] || run rm -f "$archive"
}

start() {
  [[ ${#arguments[@]} -gt 0 ]] || fail "nothing to train; give at least: -- --config=FILE --workdir=gs://BUCKET/RUN"
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

# As jaxscale.system.exits has it: saved on a signal, a lost process, storage, a hang; death by a signal, but for Ctrl-C and a
# closed pipe.
may_start_again() {
  case "$1" in
    10 | 13 | 14 | 15) return 0 ;;
    130 | 141) return 1 ;;
    *) [[ $1 -gt 128 && $1 -lt 193 ]] ;;
  esac
}

resume() {
  [[ -n $accelerator ]] || fail "--accelerator=TYPE is missing: resume may have to ask for the slice again"
  [[ ${#arguments[@]} -gt 0 ]] || fail "nothing to train; give what followed -- in run"
  if [[ -n $dry ]]; then
    echo "# if the slice is there:" && start
    echo "# if it was preempted or failed:" && renew
    return
  fi
  local now said
  while true; do
    # a slice that is about to go answers no more: with --watch its state tells more the next time
    said=""
    now="$(state)" || now="not told by gcloud"
    if [[ $now == ACTIVE ]]; then
      said="$(worker_sh 0 status "${nodes[0]}" | tail -n 1)" || said="no answer from its worker 0"
    fi
    echo "$name: $now${said:+, $said}"
    case "$now, $said" in
      "ACTIVE, running") ;;
      "ACTIVE, exit 0") return 0 ;;
      "ACTIVE, never started") install_and_start ;;
      "ACTIVE, no answer"*) ;;
      "ACTIVE, exit "*)
        if ! may_start_again "${said#exit }"; then
          echo "error: trying again does not mend $said; see tpu_vm.sh logs" >&2
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
