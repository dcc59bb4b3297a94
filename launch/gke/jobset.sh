#!/usr/bin/env bash
# A JobSet for GKE: TPU slices or GPU nodes, and a training run on all of their hosts.

set -euo pipefail

usage() {
  cat <<'TEXT'
jobset.sh VERB --name=NAME [OPTION ...] [-- ARGUMENT ...]

  render    prints the YAML                             needs --topology, --image and ARGUMENT
  apply     gives it to kubectl                         the same
  status    the JobSet and its pods
  logs      follows the first pod's log
  delete    deletes it: the pods get SIGTERM and save

  --topology=T           v4:2x2x2, v5e:4x8, v5p:4x4x8, v6e:16x16, or h100:32x8 (nodes x GPUs), a100:4x8, h200:2x8
  --slices=N             several TPU slices of that shape; default 1
  --chips-per-host=N     of the node pool's machine type; default 4, as in every pool of several hosts (ct5lp-hightpu-4t,
                         ct5p-hightpu-4t, ct6e-standard-4t)
  --accelerator=LABEL    the node label, where the one for the topology's chip is not right
  --image=IMAGE          made by launch/docker/build.sh and pushed to a registry
  --max-restarts=N       default 100
  --dry-run              prints the exact commands and runs nothing

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
port=8476 # of the coordinator between GPU nodes

verb="${1:---help}"
shift || true
case "$verb" in
  -h | --help) usage && exit 0 ;;
  render | apply | status | logs | delete) ;;
  *) fail "no verb $verb; it has render, apply, status, logs, delete" ;;
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
    *) fail "$1 is no option of jobset.sh; what belongs to the training comes after -- (--help lists the options)" ;;
  esac
  shift
done
arguments=("$@")
[[ $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] || fail "--name=$name must be 1 to 40 of a-z, 0-9 and -, from a letter"

# One line of YAML that holds the arguments as text: a list of JSON strings.
json_list() {
  local text separator="" out="["
  for text in "$@"; do
    [[ $text != *$'\n'* ]] || fail "an argument holds a line break: ${text@Q}"
    text="${text//\\/\\\\}"
    out+="$separator\"${text//\"/\\\"}\""
    separator=", "
  done
  echo "$out]"
}

render() {
  [[ $topology =~ ^[a-z0-9]+:[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] || fail "--topology=$topology must be such as v6e:4x4 or h100:32x8"
  [[ -n $image ]] || fail "--image=IMAGE is missing: one that launch/docker/build.sh made and a registry holds"
  [[ ${#arguments[@]} -gt 0 ]] || fail "nothing to train; give at least: -- --config=FILE --workdir=gs://BUCKET/RUN"
  [[ $slices =~ ^[1-9][0-9]*$ ]] || fail "--slices=$slices must be a number from 1"
  [[ $max_restarts =~ ^[0-9]+$ ]] || fail "--max-restarts=$max_restarts must be a number from 0"
  local chip="${topology%%:*}" shape="${topology#*:}" kind=tpu label hosts chips=1 size
  case "$chip" in
    v4) label=tpu-v4-podslice ;;
    v5e) label=tpu-v5-lite-podslice ;;
    v5p) label=tpu-v5p-slice ;;
    v6e) label=tpu-v6e-slice ;;
    a100) kind=gpu label=nvidia-tesla-a100 ;;
    h100) kind=gpu label=nvidia-h100-80gb ;;
    h200) kind=gpu label=nvidia-h200-141gb ;;
    *) fail "--topology=$topology: no chip $chip; it has v4, v5e, v5p, v6e, a100, h100, h200" ;;
  esac
  if [[ $kind == gpu ]]; then
    [[ $shape =~ ^[0-9]+x[0-9]+$ ]] || fail "--topology=$topology must be nodes x GPUs, such as $chip:4x8"
    [[ $slices -eq 1 ]] || fail "--slices=$slices is for TPUs; give more nodes: $chip:$((slices * ${shape%x*}))x${shape#*x}"
    hosts="${shape%x*}" chips_per_host="${shape#*x}"
    if [[ $hosts -gt 1 ]]; then
      arguments+=("--coordinator=$name-node-0-0.$name:$port" "--num_processes=$hosts" "--process_id=\$(PROCESS_ID)")
    fi
  else
    for size in ${shape//x/ }; do chips=$((chips * size)); done
    [[ -n $chips_per_host ]] || chips_per_host=$((chips < 4 ? chips : 4))
    [[ $chips_per_host =~ ^[1-9]$ ]] || fail "--chips-per-host=$chips_per_host must be 1, 4 or 8"
    [[ $((chips % chips_per_host)) -eq 0 ]] || fail "--topology=$topology has $chips chips, not a multiple of $chips_per_host a host"
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
  yaml="${yaml//\$\{ARGS\}/"$(json_list "${arguments[@]}")"}" # last: the user's text may hold anything
  echo "$yaml"
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
