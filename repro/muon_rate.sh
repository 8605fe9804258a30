#!/usr/bin/env bash
# At which learning rate is Muon best for `rms`, and what is it worth there against AdamW?
#
#   repro/muon_rate.sh curve           the curve; one worker, start one for each core
#   RATES=0.0704 repro/muon_rate.sh curve      an octave more
#   repro/muon_rate.sh step RATE       four pairs of Muon at RATE and AdamW
#
# Runs go to OUT (out/muon_rate), finished logs to RESULTS (results/cpu/muon_rate). A worker that is
# killed loses one run at most.
#
# The declaration, of 2026-11-27, before the first run. Its SHA-256 is in every run, so nothing here
# may change once a run exists.
# - Question: stage `muon` of repro/which_norm.toml found the highest of its three rates best, so
#   what Muon is worth was open above.
# - Runs: `rms` alone, the wide shape and settings of "Which norm?", bfloat16 on a processor that
#   has bfloat16 products. Curve: one, two, four and eight times 0.0044, the rate of AdamW, seeds 100
#   and 101. While the best mean of two seeds is at the upper end, one octave more, twice at most.
#   RATE: the vertex of the parabola in log2 of the rate through the best and its neighbours
#   (`python -m repro.which_norm ARCHIVE`); the best itself if a neighbour diverged.
# - Reported: val_loss_full at the last step of Muon at RATE minus that of AdamW at 0.0044, paired by
#   seed (500 to 503), mean and 95 % interval of four. No test. It is the card's "Muon for AdamW", if
#   the best rate is an interior one. All runs on processors of one model.
# - Amended on the same day, after the curve and before the first pair: sweep.sh refuses two arms of
#   different optimisers, so `step` starts it for each. The curve has the hash of the text before.
set -euo pipefail
. "$(dirname "$0")/start.sh"
[ $# != 0 ] || { usage; exit 2; }
declaration=$(sha256sum "$script" | cut -c1-16)
export OMP_NUM_THREADS=1 HELLASWAG=off
out=$(realpath -m "${OUT:-out/muon_rate}")
results=$(realpath -m "${RESULTS:-results/cpu/muon_rate}")
mkdir -p "$results"

# Train the arms $2 at the seeds $3; $1 names folder and archive.
sweep() {
  ARMS=$2 SEEDS=$3 OUT=$out/$1 KEEP=$results/$1.tar.xz ./sweep.sh config/which_norm_cpu.py \
    --n_layer=4 --n_embd=128 --n_head=4 --init_std=0.08 --study="muon_rate $declaration"
}

[ -f data/stdlib/meta.json ] || "$PYTHON" data/stdlib/prepare.py
case $1 in
  curve)
    arms=
    for rate in ${RATES:-0.0044 0.0088 0.0176 0.0352}; do
      arms+=" 'rms --optimizer=muon --learning_rate=$rate'"
    done
    sweep curve "$arms" "100 101"
    ;;
  step)
    sweep step "'rms --learning_rate=0.0044'" "500 501 502 503"
    sweep step "'rms --optimizer=muon --learning_rate=$2'" "500 501 502 503"
    ;;
  *) echo "error: $1: give curve, or step and a rate" >&2; exit 2 ;;
esac
