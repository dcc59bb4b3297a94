#!/usr/bin/env bash
# Creates a JobSet on GKE that trains on all hosts of TPU slices or GPU nodes.

set -euo pipefail

usage() {
  cat <<'TEXT'
jobset.sh VERB --name=NAME [OPTION ...] [-- ARGUMENT ...]

  render    print the YAML                              needs --topology, --image and ARGUMENT
  apply     apply the YAML with kubectl                 needs the same options
  status    show the JobSet and its pods
  logs      follow the log of the first pod
  delete    delete the JobSet; the pods receive SIGTERM and save

  --topology=T           v4:2x2x2, v5e:4x8, v5p:4x4x8, v6e:16x16, or h100:32x8 (nodes x GPUs), a100:4x8, h200:2x8
  --slices=N             number of TPU slices of that shape; default 1
  --chips-per-host=N     chips of the machine type; default 4, as in all multi-host pools (ct5lp-hightpu-4t,
                         ct5p-hightpu-4t, ct6e-standard-4t)
  --accelerator=LABEL    node label; default: that of the topology's chip
  --image=IMAGE          built by launch/docker/build.sh and pushed to a registry
  --max-restarts=N       default 100
  --dry-run              print the commands without running them

  launch/gke/jobset.sh apply --name=seven --topology=v6e:16x16 --slices=2 --image=REGISTRY/jaxscale:tpu \
      -- --config=configs/7b.py --workdir=gs://BUCKET/7b

The cluster needs the JobSet controller (kubernetes.io's SIG project "jobset") and node pools of that shape.
TEXT
}

fail() {
  echo "error: $*" >&2
  exit 2
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
name="" topology="" slices=1 chips_per_host="" accelerator="" image="" max_restarts=100 dry=""
port=8476 # port of the coordinator of GPU nodes

verb="${1:---help}"
shift || true
case "$verb" in
  -h | --help) usage && exit 0 ;;
  render | apply | status | logs | delete) ;;
  *) fail "unknown verb $verb; use render, apply, status, logs or delete" ;;
esac
while [[ $# -gt 0 ]]; do
  case "$1" in
    --name=*) name="${1#*=}" ;;
    --topology=*) topology="${1#*=}" ;;
    --slices=*) slices="${1#*=}" ;;
    --chips-per-host=*) chips_per_host="${1#*=}" ;;
    --accelerator=*) accelerator="${1#*=}" ;;
    --image=*) image="${1#*=}" ;;
    --max-restarts=*) max_restarts="${1#*=}" ;;
    --dry-run) dry=1 ;;
    -h | --help) usage && exit 0 ;;
    --) shift && break ;;
    *) fail "unknown option $1; put training flags after -- (see --help)" ;;
  esac
  shift
done
arguments=("$@")
[[ $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] || fail "--name=$name must be 1 to 40 characters of a-z, 0-9 and -, starting with a letter"

# The arguments as one line of YAML: a list of JSON strings.
json_list() {
  local text separator="" out="["
  for text in "$@"; do
    [[ $text != *$'\n'* ]] || fail "an argument contains a line break: ${text@Q}"
    text="${text//\\/\\\\}"
    out+="$separator\"${text//\"/\\\"}\""
    separator=", "
  done
  echo "$out]"
}

render() {
  [[ $topology =~ ^[a-z0-9]+:[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] || fail "--topology=$topology must be like v6e:4x4 or h100:32x8"
  [[ -n $image ]] || fail "--image=IMAGE is missing; build one with launch/docker/build.sh --push"
  [[ ${#arguments[@]} -gt 0 ]] || fail "no training flags; pass at least: -- --config=FILE --workdir=gs://BUCKET/RUN"
  [[ $slices =~ ^[1-9][0-9]*$ ]] || fail "--slices=$slices must be a positive integer"
  [[ $max_restarts =~ ^[0-9]+$ ]] || fail "--max-restarts=$max_restarts must be an integer of at least 0"
  local chip="${topology%%:*}" shape="${topology#*:}" kind=tpu label hosts chips=1 size
  case "$chip" in
    v4) label=tpu-v4-podslice ;;
    v5e) label=tpu-v5-lite-podslice ;;
    v5p) label=tpu-v5p-slice ;;
    v6e) label=tpu-v6e-slice ;;
    a100) kind=gpu label=nvidia-tesla-a100 ;;
    h100) kind=gpu label=nvidia-h100-80gb ;;
    h200) kind=gpu label=nvidia-h200-141gb ;;
    *) fail "--topology=$topology: unknown chip $chip; use v4, v5e, v5p, v6e, a100, h100 or h200" ;;
  esac
  if [[ $kind == gpu ]]; then
    [[ $shape =~ ^[0-9]+x[0-9]+$ ]] || fail "--topology=$topology must be NODESxGPUS, such as $chip:4x8"
    [[ $slices -eq 1 ]] || fail "--slices=$slices applies only to TPUs; use more nodes: $chip:$((slices * ${shape%x*}))x${shape#*x}"
    hosts="${shape%x*}" chips_per_host="${shape#*x}"
    if [[ $hosts -gt 1 ]]; then
      arguments+=("--coordinator=$name-node-0-0.$name:$port" "--num_processes=$hosts" "--process_id=\$(PROCESS_ID)")
    fi
  else
    for size in ${shape//x/ }; do chips=$((chips * size)); done
    [[ -n $chips_per_host ]] || chips_per_host=$((chips < 4 ? chips : 4))
    [[ $chips_per_host =~ ^[1-9]$ ]] || fail "--chips-per-host=$chips_per_host must be 1, 4 or 8"
    [[ $((chips % chips_per_host)) -eq 0 ]] || fail "--topology=$topology has $chips chips, not a multiple of $chips_per_host per host"
    hosts=$((chips / chips_per_host))
  fi
  local yaml
  yaml="$(<"$here/jobset-$kind.yaml")"
  yaml="${yaml//\$\{NAME\}/"$name"}"
  yaml="${yaml//\$\{MAX_RESTARTS\}/"$max_restarts"}"
  yaml="${yaml//\$\{SLICES\}/"$slices"}"
  yaml="${yaml//\$\{HOSTS\}/"$hosts"}"
  yaml="${yaml//\$\{ACCELERATOR\}/"${accelerator:-$label}"}"
  yaml="${yaml//\$\{TOPOLOGY\}/"$shape"}"
  yaml="${yaml//\$\{CHIPS_PER_HOST\}/"$chips_per_host"}"
  yaml="${yaml//\$\{IMAGE\}/"$image"}"
  yaml="${yaml//\$\{ARGS\}/"$(json_list "${arguments[@]}")"}" # last, since it may contain any text
  echo "$yaml"
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
  render) render ;;
  apply)
    manifest="$(render)"
    if [[ -n $dry ]]; then
      printf "kubectl apply -f - <<'YAML'\n%s\nYAML\n" "$manifest"
    else
      kubectl apply -f - <<<"$manifest"
    fi
    ;;
  status)
    run kubectl get jobset "$name"
    run kubectl get pods --selector="jobset.sigs.k8s.io/jobset-name=$name" --output=wide
    ;;
  logs)
    run kubectl logs --follow --tail=100 \
      --selector="jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
    ;;
  delete) run kubectl delete jobset "$name" ;;
esac
