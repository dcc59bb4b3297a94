#!/usr/bin/env bash
# Builds an image of this checkout for TPU hosts or GPU nodes.

set -euo pipefail

usage() {
  cat <<'TEXT'
build.sh tpu|cuda --tag=REGISTRY/NAME:TAG [--push] [--cuda=cuda12|cuda13] [--dry-run]

  launch/docker/build.sh tpu --tag=us-docker.pkg.dev/PROJECT/REPOSITORY/jaxscale:tpu --push
  docker run --gpus=all --volume=/data:/data --volume=/data/cache:/cache jaxscale:cuda --config=configs/7b.py

Needs docker with BuildKit (23 or newer). --dry-run prints the commands without running them.
TEXT
}

fail() {
  echo "error: $*" >&2
  exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
tag="" push="" cuda="" dry=""

kind="${1:---help}"
shift || true
case "$kind" in
  -h | --help) usage && exit 0 ;;
  tpu | cuda) ;;
  *) fail "unknown image $kind; use tpu or cuda" ;;
esac
while [[ $# -gt 0 ]]; do
  case "$1" in
    --tag=*) tag="${1#*=}" ;;
    --cuda=*) cuda="${1#*=}" ;;
    --push) push=1 ;;
    --dry-run) dry=1 ;;
    -h | --help) usage && exit 0 ;;
    *) fail "unknown option $1 (see --help)" ;;
  esac
  shift
done
[[ -n $tag ]] || fail "--tag=NAME:TAG is missing, such as --tag=jaxscale:$kind"
options=()
if [[ -n $cuda ]]; then
  [[ $kind == cuda ]] || fail "--cuda=$cuda applies only to the cuda image"
  [[ $cuda == cuda12 || $cuda == cuda13 ]] || fail "--cuda=$cuda must be cuda12 or cuda13"
  options+=("--build-arg=CUDA=$cuda")
fi

# Runs a command, or prints it with --dry-run.
run() {
  if [[ -n $dry ]]; then
    printf '%q ' "$@" && echo
  else
    "$@"
  fi
}

run docker build "--file=$root/launch/docker/Dockerfile.$kind" "--tag=$tag" "${options[@]}" "$root"
[[ -z $push ]] || run docker push "$tag"
