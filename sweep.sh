#!/usr/bin/env bash
# Train every norm type with every seed: one run folder for each, ready for report.py.
#
#   ./sweep.sh config/small.py [config files ...] [--key=value ...]
#   ARMS="rms coupled 'coupled --coupled_span=2'" SEEDS="8 9 10" NPROC=8 ./sweep.sh config/small.py
#
#   ARMS       norm types, each with any norm keys after it    (layer rms coupled cbwc taper)
#              NAME: before one gives it a name, for folders, tables and pictures:
#              ARMS="rms 'wide:coupled --coupled_span=2'"
#   SEEDS      (8 9 10 11 12 13 14 15)
#   OUT        folder of the run folders                       (out/, first config file's name)
#   HELLASWAG  off, auto (downloads the items) or their file   (off)
#   KEEP       archive (a name in .tar.xz) for each finished run's config, log and HellaSwag items;
#              runs in it are skipped
#   NPROC      processes a run, started by torchrun            (1)
#   JOBS       runs side by side, one CPU core each            (1)
#
# Before the first run it prints which differences its seeds will find with 80 % power.
#
# All arms of a seed run one after the other, each time beginning with another arm, so that a drift
# of the machine's speed affects all alike. After an interruption, run it again: finished runs are
# skipped, and those that diverged, which they would again; the interrupted one continues where it
# stopped. Each run's output is in its folder's train.txt; in a terminal its last line is shown. Exit
# codes: 1 if a run failed or diverged now (the others are still done), 2 at once if a setting is wrong,
# 130 if it was stopped.
#
# A worker claims a run before it starts it, and passes over runs that others have claimed. So
# several sweeps, also on several machines, can work on one OUT. With JOBS above 1 a run's speed
# depends on its neighbours: its log says jobs=JOBS, and report.py does not judge it.
set -euo pipefail
cd "$(dirname "$0")"
die() { echo "error: $1" >&2; exit 2; }
if [ $# = 0 ] || [ "$1" = --help ] || [ "$1" = -h ]; then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
  exit 0
fi

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-out/$(basename "$1" .py)}
KEEP=${KEEP:-}
[[ -z $KEEP || $KEEP == *.tar.xz ]] ||
  die "KEEP=$KEEP: needs an archive's name, such as runs.tar.xz"
NPROC=${NPROC:-1}
JOBS=${JOBS:-1}
[ ! -f "$OUT/config.json" ] ||
  die "OUT=$OUT is the folder of a run: give the sweep another one, OUT=out/sweep"
[ -f "$1" ] || die "$1: no such file; the first argument is a config file"

# Split text into the array keys as a shell would, quotes included. xargs executes nothing in it.
split() {
  local lines
  lines=$(xargs -n1 printf '%s\n' <<<"$1" 2>/dev/null) || die "ARMS: a quote is not closed in: $1"
  mapfile -t keys <<<"$lines"
}

split "${ARMS:-layer rms coupled cbwc taper}"
arms=("${keys[@]}")
read -ra seeds <<<"${SEEDS:-8 9 10 11 12 13 14 15}"
[ "$(printf '%s\n' "${seeds[@]}" | sort | uniq -d)" = "" ] || die "SEEDS: a seed is named twice"
for seed in "${seeds[@]}"; do
  # Without leading zeros: 08 would be seed 8 once more.
  [[ $seed =~ ^(0|[1-9][0-9]*)$ ]] ||
    die "SEEDS: $seed is no seed: give numbers such as 8, separated by blanks"
done
[[ $JOBS =~ ^[1-9][0-9]*$ ]] || die "JOBS=$JOBS: needs a number from 1 on"
common=("$@")
if [ "$JOBS" != 1 ]; then
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  common+=(--jobs="$JOBS")
fi
launcher=("$PYTHON")
[ "$NPROC" = 1 ] || launcher+=(-m torch.distributed.run --standalone --nproc_per_node="$NPROC")

# Read an arm into `keys`, and into `name` what its runs are called without the seed: its own name,
# else the keys with + between, without --, and with _ for blanks and slashes.
read_arm() {
  name=
  [[ ! $1 =~ ^([[:alnum:]_.-]+):. ]] || name=${BASH_REMATCH[1]}
  split "${1#"$name:"}"
  [ -z "$name" ] || { keys+=(--arm="$name"); return; }
  local IFS=+
  name="${keys[*]}"
  name=${name//+--/+}
  name=${name//[ \/]/_}
}

check=()
names=()  # of all runs
for arm in "${arms[@]}"; do
  read_arm "$arm"
  check+=("::" "$name" --norm_type="${keys[0]}" "${keys[@]:1}")
  for seed in "${seeds[@]}"; do names+=("$name-$seed"); done
done
"$PYTHON" -c '
from common.errors import run_program
from configurator import parse_args
from evals.hellaswag import load_items
from evidence.sweep import check
from load import take_shape
from norm_plan import NormConfig
from train import TrainConfig
from training.tracker import check_tracker


def main(argv):
    hellaswag, *words = argv

    def parse(keys):
        keys = [*keys, f"--out_dir={words[0]}"]
        config, _ = parse_args(TrainConfig, keys, complete=take_shape)
        check_tracker(config.tracker)
        return config

    check(parse, set(NormConfig.__dataclass_fields__), words)
    if hellaswag != "off":  # downloaded, or refused, before the first run
        load_items("" if hellaswag == "auto" else hellaswag)


run_program(main)
' "${HELLASWAG:-off}" "$OUT" "${seeds[*]}" "${common[@]}" "${check[@]}" || exit 2

kept=$'\n'
[ -z "$KEEP" ] || kept+=$("$PYTHON" -m evidence.archive "$KEEP")$'\n' || exit 1
total=$((${#arms[@]} * ${#seeds[@]}))

mkdir -p "$OUT" 2>/dev/null ||
  die "OUT=$OUT: cannot be made: check permissions and disk, or choose another OUT"
# Of runs, by name: said/, a line was printed of it; began/, a worker here has trained it;
# elsewhere/, somebody else does. And for each worker a file that says where it is.
state=$(mktemp -d)
mkdir "$state/said" "$state/began" "$state/elsewhere"
clear=
[ ! -t 1 ] || clear=$'\r\033[J'

# Print a line about run $1, the first one. In a terminal it takes the place of the display, which
# goes on below.
tell() {
  (set -o noclobber; : >"$state/said/$1") 2>/dev/null || return 1
  printf '%s%s\n' "$clear" "$2"
}

is_over() { grep -qsE '"event": "end", "reason": "(done|step .* is not finite)"' "$OUT/$1/log.jsonl"; }
# Did run $1, which is over, end with a loss that is not finite, in training or of validation?
has_diverged() {
  local log=$OUT/$1/log.jsonl
  grep -qs '"event": "end", "reason": "step .* is not finite"' "$log" ||
    { grep -s '"event": "eval"' "$log" | tail -n 1; grep -s '"event": "val_full"' "$log" || true; } |
    grep -qE '"val_loss(_full)?": null'
}

# Print the warnings of run $1, called $2, that no run before it had. They stay in its train.txt.
tell_warnings() {
  local line
  grep -as '^warning:' "$OUT/$1/train.txt" | while read -r line; do
    tell "$(cksum <<<"$line")" "$2: $line" || true
  done || true
}

# Have the sweep stop with code $1.
stop_all() {
  echo "$1" >"$state/code"
  kill -TERM $$
  exit "$1"
}

# Under a claim, so that this worker alone writes the output of run $1: train it, unless it was done
# meanwhile. $2 is the mark that it began; then comes the command. The claim is a lock on an open file,
# which the command inherits, so that it ends with the command, however that ends. Without flock, or
# in a file system without locks, train.py keeps others out of its folder.
export OUT
export -f is_over
start='
  name=$1 began=$2
  shift 2
  mkdir -p "$OUT/$name" && exec 9>>"$OUT/$name/claim" || exit 1
  flock -n -E 75 9 2>/dev/null || [ $? != 75 ] || exit 75
  ! is_over "$name" || exit 75
  : >"$began"
  exec "$@" >>"$OUT/$name/train.txt" 2>&1'

# As worker $1 train run $2, called $3, by train.py with the other arguments. Returns 1 if it
# failed, 75 if another worker has it.
train() {
  local worker=$1 name=$2 label=$3 run=$OUT/$2 began=$SECONDS status=0 last
  shift 3
  printf '%s\n' "$label" "$run/train.txt" >"$state/$worker"
  bash -c "$start" - "$name" "$state/began/$name" "${launcher[@]}" train.py "$@" &
  child=$!
  wait "$child" || status=$?
  child=
  [ "$status" != 75 ] || return 75
  tell_warnings "$name" "$label"
  # torchrun prints its own report below the error of a rank, so the last line will not do.
  last=$(grep -as '^error:' "$run/train.txt" | tail -n 1) && [ "$status" != 0 ] ||
    last=$(tail -n 1 "$run/train.txt" 2>/dev/null)
  case $status:$last in
    0:stopped*) tell "$name" "$label: $last"; stop_all 130 ;;
    0:*)
      ! has_diverged "$name" || last="diverged: its last val loss is not finite"
      tell "$name" "$label: $last  ($((SECONDS - began)) s)"
      ! has_diverged "$name"
      ;;
    1:*": another process is working there"*) rm -f "$state/began/$name"; return 75 ;;
    *)
      # A full disk takes no message either.
      [[ $last == error:* ]] ||
        last+=" (see $run/train.txt; if the disk is full, make room and run it again)"
      tell "$name" "$label: FAILED with exit code $status: $last"
      [ "$status" != 2 ] || stop_all 2
      return 1
      ;;
  esac
}

# As worker $1 go through all runs, and train those that nobody has.
work() {
  local failed=0 number=0 round turn arm seed name label status
  child=
  trap '[ -z "$child" ] || { kill -TERM "$child" 2>/dev/null; wait "$child" || true; }; exit 130' \
    INT TERM HUP
  for round in "${!seeds[@]}"; do
    for turn in "${!arms[@]}"; do
      arm=${arms[(turn + round) % ${#arms[@]}]}
      seed=${seeds[round]}
      read_arm "$arm"
      name=$name-$seed
      number=$((number + 1))
      label="[$number/$total] $name"
      [ ! -e "$state/began/$name" ] || continue
      if [[ $kept == *$'\n'"$name"$'\n'* ]]; then
        tell "$name" "$label: in $KEEP already" || true
        continue  # finished, or diverged when it was trained
      fi
      if is_over "$name" && has_diverged "$name"; then
        tell "$name" "$label: diverged; it would again: remove its folder to train it once more" ||
          continue
        failed=1
      elif is_over "$name"; then
        tell "$name" "$label: done already" || continue
      else
        status=0
        train "$1" "$name" "$label" "${common[@]}" --norm_type="${keys[0]}" "${keys[@]:1}" \
          --seed="$seed" --out_dir="$OUT/$name" --hellaswag="${HELLASWAG:-off}" || status=$?
        [ $status != 75 ] || { : >"$state/elsewhere/$name"; continue; }
        [ $status = 0 ] || failed=1
      fi
      if [ -n "$KEEP" ] && is_over "$name"; then
        "$PYTHON" -m evidence.archive "$KEEP" "$OUT/$name" || failed=1
      fi
    done
  done
  exit $failed
}

# Show for each worker its run and the last line of it.
show() {
  local text shown worker label output
  while sleep 1 && kill -0 $$; do
    text=
    shown=0
    for ((worker = 1; worker <= JOBS; worker++)); do
      { read -r label && read -r output; } <"$state/$worker" || continue
      label="$label: $(tail -n 1 "$output")"
      text+=$'\r\033[K'${label:0:$(tput cols 2>/dev/tty) - 1}$'\n'
      shown=$((shown + 1))
    done
    [ $shown = 0 ] || printf '%s\033[%dA' "$text" $shown
  done 2>/dev/null
}

workers=()
display=
# Stop what still runs, and exit with code $1.
finish() {
  trap '' INT TERM HUP
  kill -TERM "${workers[@]}" $display 2>/dev/null || true
  wait
  printf '%s' "$clear"
  local name left=
  for name in "$state"/elsewhere/*; do
    name=${name##*/}
    [ "$name" = "*" ] || [ -e "$state/began/$name" ] || is_over "$name" || left+=" $name"
  done
  rm -rf "$state"
  [ -z "$left" ] || echo "others are training:$left; if one of them dies, run this again"
  local over=0
  for name in "${names[@]}"; do
    if [[ $kept == *$'\n'"$name"$'\n'* ]] || is_over "$name"; then over=$((over + 1)); fi
  done
  read_arm "${arms[0]}"
  local base=${keys[-1]#--arm=}
  # report.py names an arm without rates of its own.
  [ "$base" != "${keys[-1]}" ] ||
    base=$(printf '%s\n' "${keys[@]}" | grep -vE '^--(learning_rate|min_lr|warmup_iters)=' | paste -sd' ')
  [ "$over" = "$total" ] && printf '%s of %s runs done; next: python report.py %q --baseline=%q\n' \
    "$over" "$total" "${KEEP:-$OUT}" "$base" || echo "$over of $total runs done"
  [ "$1" != 130 ] || echo "stopped; run it again to go on"
  exit "$1"
}
trap 'finish "$(cat "$state/code" 2>/dev/null || echo 130)"' INT TERM HUP

for ((worker = 1; worker <= JOBS; worker++)); do
  work "$worker" &
  workers+=($!)
done
if [ -n "$clear" ]; then
  show &
  display=$!
fi
failed=0
for pid in "${workers[@]}"; do
  wait "$pid" || failed=1
done
finish $failed
