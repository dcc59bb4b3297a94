#!/usr/bin/env bash
# Runs on a worker of a TPU slice, copied there and called by tpu_vm.sh: one training process per worker, in $HOME/jaxscale.

set -euo pipefail

usage() {
  cat <<'TEXT'
worker.sh install FILE.tar.gz|URL [REF] [EXTRAS]   install code and a virtual environment; default EXTRAS tpu,gcs
worker.sh start [ARGUMENT ...]                     start python -m jaxscale.main ARGUMENT ... in the background, unless running
worker.sh status                                   print 'running', 'exit N', or 'never started'
worker.sh stop                                     send SIGTERM and wait: the run saves and exits with code 10
worker.sh logs                                     follow the log

All files are in $JAXSCALE_HOME, default ~/jaxscale: code/ venv/ log pid exit. After a lost peer, failed save, hang or
signal (exit 13, 14, 15, above 128 except 130 and 141), the process is restarted up to $JAXSCALE_RESTARTS times, default 3.
TEXT
}

home="${JAXSCALE_HOME:-$HOME/jaxscale}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")"

# TPU VM images may have a Python older than 3.11; uv installs its own.
make_venv() {
  if python3 -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python3 -m venv "$home/venv"
  else
    python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --seed --clear --python 3.12 "$home/venv"
  fi
}

install() {
  local source="$1" ref="${2:-}" extras="${3:-tpu,gcs}"
  mkdir -p "$home"
  rm -rf "$home/code"
  if [[ -f $source ]]; then
    mkdir "$home/code"
    tar -xzf "$source" -C "$home/code"
  else
    git clone --quiet "$source" "$home/code"
    if [[ -n $ref ]]; then
      git -C "$home/code" checkout --quiet "$ref"
    fi
  fi
  if [[ ! -x $home/venv/bin/python ]]; then
    make_venv
  fi
  "$home/venv/bin/python" -m pip install --quiet -e "$home/code[$extras]"
  echo "$(hostname): installed"
}

is_running() {
  [[ -f $home/pid ]] && kill -0 "$(cat "$home/pid")" 2>/dev/null
}

start() {
  if is_running; then
    echo "$(hostname): already running"
    return
  fi
  rm -f "$home/exit" "$home/pid"
  setsid nohup bash "$here" supervise "$@" >>"$home/log" 2>&1 </dev/null &
  while [[ ! -f $home/pid ]] && kill -0 $! 2>/dev/null; do sleep 0.1; done # an earlier signal would kill it
  echo "$(hostname): started"
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

supervise() {
  local code=10 restarts=0 training="" told_to_end=""
  trap 'told_to_end=1; [[ -n $training ]] && kill -TERM "$training" 2>/dev/null' TERM
  echo $$ >"$home/pid"
  cd "$home/code"
  while [[ -z $told_to_end ]]; do
    "$home/venv/bin/python" -m jaxscale.main "$@" &
    training=$!
    [[ -z $told_to_end ]] || kill -TERM "$training" 2>/dev/null || true # a signal between the two lines above
    code=0
    while kill -0 "$training" 2>/dev/null; do # a signal ends wait, not the training
      code=0
      wait "$training" || code=$?
    done
    if [[ $code -eq 10 ]] || ! may_start_again "$code"; then # 10: saved on a signal; `resume` restarts it
      break
    fi
    if [[ -n $told_to_end || $restarts -ge ${JAXSCALE_RESTARTS:-3} ]]; then
      break
    fi
    restarts=$((restarts + 1))
    echo "worker.sh: exit $code; restarting ($restarts)"
    sleep 10
  done
  echo "$code" >"$home/exit"
  echo "worker.sh: exit $code"
}

status() {
  if is_running; then
    echo running
  elif [[ -f $home/exit ]]; then
    echo "exit $(cat "$home/exit")"
  elif [[ -f $home/pid ]]; then
    echo "exit 137" # the supervisor was killed before it could write a code
  else
    echo "never started"
  fi
}

stop() {
  if is_running; then
    kill -TERM "$(cat "$home/pid")"
    while is_running; do sleep 1; done
  fi
  echo "$(hostname): $(status)"
}

case "${1:-}" in
  -h | --help) usage ;;
  install | start | supervise) "$@" ;;
  status | stop) "$1" ;;
  logs) exec tail -n 100 -F "$home/log" ;;
  *)
    echo "error: worker.sh: unknown verb ${1:-} (see --help)" >&2
    exit 2
    ;;
esac
