#!/usr/bin/env bash
# Is 0.02 (768 / n_embd)^0.75 a good init_std below 768 channels? `rms` at 256 and at 384.
#
#   repro/init_std.sh [256|384 ...]    one worker, both widths; start one for each core
#   RATES=0.0088 VALUES=0.0456 repro/init_std.sh 256    an octave more for one value
#
# Runs go to OUT (out/init_std), finished logs to RESULTS (results/cpu/init_std). A worker that is
# killed loses one run at most.
#
# The declaration, of 2026-11-26, before the first run; on the 27th float32 became bfloat16, when
# the first two runs had shown that float32 takes half an hour a run at 384 (killed before an
# evaluation). Its SHA-256 is in every run, so nothing here may change once a run exists.
# - Question: initialisation is the largest effect measured here, and the best values at 128 and 64
#   channels (0.08, 0.125) lie on this rule (0.077, 0.129), as does GPT-2's 0.02 at 768. Does it
#   hold between?
# - Runs: `rms`, seed 101, config/which_norm_cpu.py in bfloat16. 256: 4 blocks, 8 heads, 2 M tokens.
#   384: nanoGPT's shakespeare_char, 6 blocks and heads, context 256, 2 M tokens of the same text.
#   At each width the rule's value (0.0456, 0.0336), a 1.6th of it and 1.6 times it, each at three
#   rates an octave apart; where the best rate of a value is at an end, one octave more.
# - Judged: val_loss_full of each value at its best rate. If at both widths the rule's is at most
#   0.01 nats above the lowest, init_std=auto means the rule below 768 channels and becomes the
#   default, the same for every norm type; else the default stays 0.02. One seed: no interval.
set -euo pipefail
. "$(dirname "$0")/start.sh"
declaration=$(sha256sum "$script" | cut -c1-16)
export OMP_NUM_THREADS=1 HELLASWAG=off SEEDS=101
out=$(realpath -m "${OUT:-out/init_std}")
results=$(realpath -m "${RESULTS:-results/cpu/init_std}")

# Train at the width $1, with the init_std $2 and the rates $3; the other words are keys of the shape.
sweep() {
  local width=$1 init_std=$2 rate arms=
  for rate in ${RATES:-$3}; do arms+=" 'rms --learning_rate=$rate'"; done
  shift 3
  ARMS=$arms OUT=$out/$width/$init_std KEEP=$results/$width-$init_std.tar.xz ./sweep.sh \
    config/which_norm_cpu.py --n_embd=$width --init_std=$init_std "$@" \
    --study="init_std $declaration"
}

mkdir -p "$results"
[ -f data/stdlib/meta.json ] || "$PYTHON" data/stdlib/prepare.py
status=0  # of a run that diverged: the others go on
[ $# != 0 ] || set -- 256 384
for width in "$@"; do
  case $width in
    256) for value in ${VALUES:-0.0456 0.0285 0.073}; do
      sweep 256 $value "0.0011 0.0022 0.0044" --n_layer=4 --n_head=8 || status=$?
    done ;;
    384) for value in ${VALUES:-0.0336 0.021 0.0538}; do
      sweep 384 $value "0.0005 0.001 0.002" --n_layer=6 --n_head=6 --block_size=256 --batch_size=8 \
        || status=$?
    done ;;
    *) echo "error: $width: a width is 256 or 384" >&2; exit 2 ;;
  esac
done
exit $status
