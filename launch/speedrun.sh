#!/usr/bin/env bash
# From text to a model that answers, with its report card: every stage in turn, on this machine.

set -euo pipefail

usage() {
  cat <<'TEXT'
speedrun.sh [OPTION ...] [-- ARGUMENT ...]

  launch/speedrun.sh --depth=4                   5.3e6 parameters, from this Python's own library: no data is needed
  launch/speedrun.sh --depth=12 --text='corpus/*.jsonl' --chat='chat/*.jsonl' --held='held/*.jsonl' \
      --questions=arc_easy.jsonl --folder=runs/twelve -- --config.model.compute_dtype=bfloat16

  --depth=4          the one dial: layers, and from them width, batch, rate, tokens (configs/auto.py) and vocabulary.
                     1 is for a CPU
  --folder=FOLDER    where everything goes; default runs/speedrun-DEPTH
  --text=FILES       to train the tokenizer and the model on; with the next two: without them, sets that are made of
                     this Python's standard library
  --chat=FILES       conversations, JSON lines as docs/finetune.md has them
  --held=FILES       text to measure on, kept from training
  --questions=FILE   with answers to choose from, as `jaxscale evaluate --choice` reads them; may be left out
  --vocab_size=N     of the tokenizer; default 1024 for each layer, 32768 at most
  --most_bytes=N     of the standard library; default all, about 12 MB
  --price=DOLLARS    of a chip and hour, for the report; default its list price
  --only=STAGE       this stage alone: data, tokenizer, base, chat, evaluate or card
  --dry-run          prints the exact commands and runs nothing
  -- ARGUMENT ...    more flags for pretraining, such as --config.mesh.tensor=2

Killed, or stopped with Ctrl-C, the same command goes on: FOLDER/stages has a mark for each stage that is done, and the
others go on from their own checkpoints. The end is FOLDER/card.md, and FOLDER/report.html with all curves.
It needs pip install -e '.[prepare,chat]'.
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
    *) fail "$1 is no option of speedrun.sh; what belongs to the training comes after -- (--help lists the options)" ;;
  esac
  shift
done
arguments=("$@")

whole='^[1-9][0-9]*$'
stages=(data tokenizer base chat evaluate card)
[[ $depth =~ $whole ]] || fail "--depth=$depth must be a number from 1"
[[ -z $vocab_size || $vocab_size =~ $whole ]] || fail "--vocab_size=$vocab_size must be a number from 1"
[[ -z $most_bytes || $most_bytes =~ $whole ]] || fail "--most_bytes=$most_bytes must be a number from 1"
[[ -z $only || " ${stages[*]} " == *" $only "* ]] || fail "--only=$only is no stage; they are ${stages[*]}"
if [[ -n $text || -n $chat || -n $held || -n $questions ]]; then
  [[ -n $text && -n $chat && -n $held ]] || fail "own data are --text, --chat and --held together; one of them is missing"
  [[ -z $most_bytes ]] || fail "--most_bytes=$most_bytes is for the standard library; leave it out with own data"
fi
[[ -n $folder ]] || folder="runs/speedrun-$depth"
[[ $folder != *://* ]] || fail "--folder=$folder must be a local folder; copy checkpoints out of it with jaxscale ckpt copy"
if [[ -z $vocab_size ]]; then
  vocab_size=$((1024 * depth < 32768 ? 1024 * depth : 32768)) # tables about as large as four layers, no more
fi

run() {
  if [[ -n $dry ]]; then
    printf '%q ' "$@" && echo
  else
    "$@"
  fi
}

python="${JAXSCALE_PYTHON:-python3}"

verb() { # not the script of that name, which may be another checkout's
  run "$python" -m jaxscale.cli "$@"
}

make_data() {
  [[ -n $text ]] && return
  local most=()
  [[ -z $most_bytes ]] || most=("--most_bytes=$most_bytes")
  run "$python" -m jaxscale.tools.corpus.stdlib_sets "--output=$folder/data" "${most[@]}"
}

make_tokenizer() { # and the tokens themselves
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
    --config.optim.peak_lr=5e-4 # small models bear more than the 2e-5 of one of 7e9 parameters
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

# A stage that is done has a mark, written when nothing of it is missing.
stage() {
  local name="$1" mark="$folder/stages/$1"
  shift
  [[ -z $only || $only == "$name" ]] || return 0
  if [[ -n $dry ]]; then
    echo "# $name"
  elif [[ -e $mark && -z $only ]]; then
    echo "== $name: done before"
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
    fail "$folder was begun otherwise ($(cat "$folder/wanted")); give the same options, or another --folder"
fi

speedrun() { # read whole before it begins: this file may change while it runs
  stage data make_data
  stage tokenizer make_tokenizer
  stage base train_base
  stage chat train_chat
  stage evaluate evaluate
  stage card make_card
}
speedrun
