#!/usr/bin/env bash
# Runs all stages from text to a chat model and its report card on this machine.

set -euo pipefail

usage() {
  cat <<'TEXT'
speedrun.sh [OPTION ...] [-- ARGUMENT ...]

  launch/speedrun.sh --depth=4                   5.3e6 parameters, trained on Python's standard library
  launch/speedrun.sh --depth=12 --text='corpus/*.jsonl' --chat='chat/*.jsonl' --held='held/*.jsonl' \
      --questions=arc_easy.jsonl --folder=runs/twelve -- --config.model.compute_dtype=bfloat16

  --depth=4          number of layers, which sets width, batch, learning rate, tokens (configs/auto.py) and
                     vocabulary; use 1 on a CPU
  --folder=FOLDER    output folder; default runs/speedrun-DEPTH
  --text=FILES       training text for the tokenizer and the model; needs --chat and --held too. Default: data
                     made from the source of Python's standard library
  --chat=FILES       conversations as JSON lines, see docs/finetune.md
  --held=FILES       held-out text for evaluation
  --questions=FILE   multiple-choice questions for `jaxscale evaluate --choice`; optional
  --vocab_size=N     vocabulary size; default 1024 per layer, at most 32768
  --most_bytes=N     limit for the standard library; default: all, about 12 MB
  --price=DOLLARS    price per chip-hour for the report; default: list price
  --only=STAGE       run only this stage: data, tokenizer, base, chat, evaluate or card
  --dry-run          print the commands without running them
  -- ARGUMENT ...    additional pretraining flags, such as --config.mesh.tensor=2

To resume after an interruption, run the same command: stages marked as done in FOLDER/stages are skipped, others resume
from their checkpoints. Results: FOLDER/card.md, and FOLDER/report.html with all curves.
Requires pip install -e '.[prepare,chat]'.
TEXT
}

fail() {
  echo "error: $*" >&2
  exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
depth=4 folder="" text="" chat="" held="" questions="" vocab_size="" most_bytes="" price="" only="" dry=""
while [[ $# -gt 0 ]]; do
  case "$1" in
    --depth=*) depth="${1#*=}" ;;
    --folder=*) folder="${1#*=}" ;;
    --text=*) text="${1#*=}" ;;
    --chat=*) chat="${1#*=}" ;;
    --held=*) held="${1#*=}" ;;
    --questions=*) questions="${1#*=}" ;;
    --vocab_size=*) vocab_size="${1#*=}" ;;
    --most_bytes=*) most_bytes="${1#*=}" ;;
    --price=*) price="${1#*=}" ;;
    --only=*) only="${1#*=}" ;;
    --dry-run) dry=1 ;;
    -h | --help) usage && exit 0 ;;
    --) shift && break ;;
    *) fail "unknown option $1; put training flags after -- (see --help)" ;;
  esac
  shift
done
arguments=("$@")

whole='^[1-9][0-9]*$'
stages=(data tokenizer base chat evaluate card)
[[ $depth =~ $whole ]] || fail "--depth=$depth must be a positive integer"
[[ -z $vocab_size || $vocab_size =~ $whole ]] || fail "--vocab_size=$vocab_size must be a positive integer"
[[ -z $most_bytes || $most_bytes =~ $whole ]] || fail "--most_bytes=$most_bytes must be a positive integer"
[[ -z $only || " ${stages[*]} " == *" $only "* ]] || fail "--only=$only is not a stage; the stages are ${stages[*]}"
if [[ -n $text || -n $chat || -n $held || -n $questions ]]; then
  [[ -n $text && -n $chat && -n $held ]] || fail "own data needs --text, --chat and --held; add the missing ones"
  [[ -z $most_bytes ]] || fail "--most_bytes=$most_bytes applies only to the standard library; remove it when using own data"
fi
[[ -n $folder ]] || folder="runs/speedrun-$depth"
[[ $folder != *://* ]] || fail "--folder=$folder must be a local folder; use jaxscale ckpt copy to copy checkpoints elsewhere"
if [[ -z $vocab_size ]]; then
  vocab_size=$((1024 * depth < 32768 ? 1024 * depth : 32768)) # embeddings at most about as large as four layers
fi

run() {
  if [[ -n $dry ]]; then
    printf '%q ' "$@" && echo
  else
    "$@"
  fi
}

python="${JAXSCALE_PYTHON:-python3}"

verb() { # not the installed jaxscale command, which may be from another checkout
  run "$python" -m jaxscale.cli "$@"
}

make_data() {
  [[ -n $text ]] && return
  local most=()
  [[ -z $most_bytes ]] || most=("--most_bytes=$most_bytes")
  run "$python" -m jaxscale.tools.corpus.stdlib_sets "--output=$folder/data" "${most[@]}"
}

make_tokenizer() { # also tokenizes
  local stages_of='--config.stages=["exact_dedup"]'
  [[ -z $text ]] || stages_of='--config.stages=["repair","exact_dedup","near_dedup"]'
  verb prepare "--input=${text:-$folder/data/text.jsonl}" "--output=$folder/tokens" "$stages_of" \
    "--config.tokenizer.train.vocab_size=$vocab_size" \
    '--config.tokenizer.train.special_tokens=["<|im_start|>","<|im_end|>"]'
}

train_base() {
  verb train "--config=$root/configs/auto.py:depth=$depth" "--workdir=$folder/base" \
    --config.data.name=tokens "--config.data.files=$folder/tokens/manifest.json" \
    "--config.data.tokenizer=$folder/tokens/tokenizer.json" "--config.model.vocab_size=$vocab_size" "${arguments[@]}"
}

train_chat() {
  verb train "--config=$root/configs/finetune.py:full,$folder/base" "--workdir=$folder/chat" \
    "--config.data.files=${chat:-$folder/data/chat.jsonl}" --config.batch_tokens="8 rows" \
    --config.optim.peak_lr=5e-4 # small models tolerate more than the 2e-5 of a 7B model
}

evaluate() {
  local asked=("--text=held=${held:-$folder/data/held.jsonl}") model
  [[ -n $text ]] || questions="$folder/data/questions.jsonl"
  [[ -z $questions ]] || asked+=("--choice=questions=$questions")
  for model in base chat; do
    verb evaluate "--workdir=$folder/$model" "${asked[@]}" --save
  done
}

make_card() {
  local both=("--workdir=$folder/base" "--workdir=$folder/chat")
  [[ -z $price ]] || both+=("--price=$price")
  verb report "${both[@]}" "--output=$folder/report.html"
  verb report "${both[@]}" --card "--output=$folder/card.md"
  [[ -n $dry ]] || cat "$folder/card.md"
}

# Marks a stage as done once all of its output exists.
stage() {
  local name="$1" mark="$folder/stages/$1"
  shift
  [[ -z $only || $only == "$name" ]] || return 0
  if [[ -n $dry ]]; then
    echo "# $name"
  elif [[ -e $mark && -z $only ]]; then
    echo "== $name: already done"
    return 0
  else
    echo "== $name"
  fi
  "$1"
  if [[ -z $dry ]]; then
    date -u +%Y-%m-%dT%H:%M:%SZ >"$mark.new" && mv "$mark.new" "$mark"
  fi
}

if [[ -z $dry ]]; then
  mkdir -p "$folder/stages"
  wanted="depth=$depth vocab_size=$vocab_size most_bytes=$most_bytes text=$text chat=$chat held=$held ${arguments[*]}"
  [[ -e $folder/wanted ]] || echo "$wanted" >"$folder/wanted"
  [[ $(cat "$folder/wanted") == "$wanted" ]] ||
    fail "$folder was started with other options ($(cat "$folder/wanted")); use the same options, or another --folder"
fi

speedrun() { # a function, so that bash reads it entirely before running it: this file may change meanwhile
  stage data make_data
  stage tokenizer make_tokenizer
  stage base train_base
  stage chat train_chat
  stage evaluate evaluate
  stage card make_card
}
speedrun
