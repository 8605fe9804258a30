#!/usr/bin/env bash
# Train every norm type with every seed: one run folder for each, ready for report.py.
#
#   ./sweep.sh config/small.py [config files ...] [--key=value ...]
#   ARMS="rms coupled 'coupled --coupled_span=2'" SEEDS="8 9 10" NPROC=8 ./sweep.sh config/small.py
#
#   ARMS       norm types, each with any norm keys after it    (layer rms coupled cbwc taper)
#   SEEDS      (8 9 10 11 12 13 14 15)
#   OUT        folder of the run folders                       (out/, first config file's name)
#   HELLASWAG  off, auto (downloads the items) or their file   (auto)
#   KEEP       archive (a name in .tar.xz) for each finished run's config, log and HellaSwag items;
#              runs in it are skipped
#   NPROC      processes a run, started by torchrun            (1)
#
# All arms of a seed run one after the other, each time beginning with another arm, so that a drift
# of the machine's speed affects all alike. After an interruption, run it again: finished runs are
# skipped, the interrupted one continues where it stopped. Each run's output is in its folder's
# train.txt. Exit codes: 1 if a run failed (the others are still done), 2 at once if a setting is
# wrong, 130 if it was stopped.
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
[ "$(printf '%s\n' "${arms[@]}" | sort | uniq -d)" = "" ] || die "ARMS: an arm is named twice"
read -ra seeds <<<"${SEEDS:-8 9 10 11 12 13 14 15}"
[ "$(printf '%s\n' "${seeds[@]}" | sort | uniq -d)" = "" ] || die "SEEDS: a seed is named twice"
for seed in "${seeds[@]}"; do
  [[ $seed =~ ^[0-9]+$ ]] || die "SEEDS: $seed is no seed: give numbers, separated by blanks"
done
launcher=("$PYTHON")
[ "$NPROC" = 1 ] || launcher+=(-m torch.distributed.run --standalone --nproc_per_node="$NPROC")

# Check all arms now: a wrong key in the last one must not show only after the others have trained.
check=()
for arm in "${arms[@]}"; do
  split "$arm"
  check+=("::" --norm_type="${keys[0]}" "${keys[@]:1}")
done
"$PYTHON" -c '
import sys
from configurator import parse_args
from common.errors import run_program
from train import TrainConfig

# The common arguments, then for each arm :: and its keys.
def main(argv):
    marks = [i for i, argument in enumerate(argv) if argument == "::"] + [len(argv)]
    for start, end in zip(marks, marks[1:]):
        parse_args(TrainConfig, argv[: marks[0]] + argv[start + 1 : end])

run_program(main)' "$@" "${check[@]}" || exit 2

kept=$'\n'
[ -z "$KEEP" ] || kept+=$("$PYTHON" -m evidence.archive "$KEEP")$'\n' || exit 1
child=
failed=0
number=0
total=$((${#arms[@]} * ${#seeds[@]}))
stop() {
  [ -z "$child" ] || { kill -TERM "$child" 2>/dev/null; wait "$child" || true; }
  echo "stopped; run it again to go on"
  exit 130
}
trap stop INT TERM HUP

for round in "${!seeds[@]}"; do
  for turn in "${!arms[@]}"; do
    arm=${arms[(turn + round) % ${#arms[@]}]}
    seed=${seeds[round]}
    split "$arm"
    # The run's name: keys with + between, without --, and with _ for blanks and slashes.
    name=$(IFS=+; echo "${keys[*]}")
    name=${name//+--/+}
    name=${name//[ \/]/_}-$seed
    number=$((number + 1))
    run=$OUT/$name
    label="[$number/$total] $name"
    if [[ $kept == *$'\n'"$name"$'\n'* ]]; then echo "$label: in $KEEP already"; continue; fi
    if grep -qs '"event": "end", "reason": "done"' "$run/log.jsonl"; then
      echo "$label: done already"
    else
      mkdir -p "$run"
      start=$SECONDS
      status=0
      "${launcher[@]}" train.py "$@" --norm_type="${keys[0]}" "${keys[@]:1}" --seed="$seed" \
        --out_dir="$run" --hellaswag="${HELLASWAG:-auto}" >"$run/train.txt" 2>&1 &
      child=$!
      wait "$child" || status=$?
      child=
      # torchrun prints its own report below the error of a rank, so the last line will not do.
      last=$(grep -a '^error:' "$run/train.txt" | tail -n 1) && [ "$status" != 0 ] ||
        last=$(tail -n 1 "$run/train.txt")
      case $status:$last in
        0:stopped*) echo "$label: $last"; stop ;;
        0:*) echo "$label: $last  ($((SECONDS - start)) s)" ;;
        *)
          echo "$label: FAILED with exit code $status: $last"
          failed=1
          [ "$status" != 2 ] || exit 2
          continue
          ;;
      esac
    fi
    [ -z "$KEEP" ] || "$PYTHON" -m evidence.archive "$KEEP" "$run" || failed=1
  done
done
exit $failed
