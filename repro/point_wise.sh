#!/usr/bin/env bash
# Do point-wise norms suffer more under Muon than under AdamW, as Derf does in arXiv 2604.01563?
#
#   git worktree add CODE COMMIT                     the code of the runs so far, or HEAD
#   repro/point_wise.sh CODE rates                   one worker; start one for each core
#   RATES=0.001 OPTIMIZERS=adamw ARMS=dyt repro/point_wise.sh CODE rates      an octave more
#   repro/point_wise.sh CODE pairs OPTIMIZER RATE RATE RATE    the rates of rms, dyt and derf
#
# Runs go to OUT (out/point_wise), finished logs to RESULTS (results/cpu/point_wise). A worker that
# is killed loses one run at most.
#
# The declaration, of 2026-11-28, before the first run. Its SHA-256 is in every run, so nothing here
# may change once a run exists.
# - Question: at 1 B parameters and 1,000 steps that paper has Derf 0.31 nats above RMSNorm with
#   AdamW and 0.97 with Muon, while DyT's gap does not grow. Is it so at 0.8 M?
# - Runs: rms, dyt, derf in the wide shape of "Which norm?" and its settings, in float32, as in
#   leads.sh and for its reason.
# - Rates: three octaves for each arm and optimiser with seed 112, around 0.004 for AdamW and 0.0088
#   for Muon. While the best is at an end, one octave more there, twice at most. Chosen is the best
#   rate of the grid.
# - Reported: val_loss_full of seeds 740 to 743 at these rates. For dyt and derf the difference of
#   differences, (arm - rms with Muon) - (arm - rms with AdamW), paired by seed, with its 95 %
#   interval of four. No test and no verdict.
# - All runs of a seed on processors of one model.
set -euo pipefail
. "$(dirname "$0")/start.sh"
[ $# -ge 2 ] || { usage; exit 2; }
declaration=$(sha256sum "$script" | cut -c1-16)
code=$(realpath "$1") stage=$2
shift 2
export OMP_NUM_THREADS=1 HELLASWAG=off PYTHON="$(realpath -s "$PYTHON")"
out=$(realpath -m "${OUT:-out/point_wise}")
results=$(realpath -m "${RESULTS:-results/cpu/point_wise}")
mkdir -p "$out" "$results"

# Train the arms $2 at the seeds $3 with the optimiser $1.
sweep() {
  ARMS=$2 SEEDS=$3 OUT=$out/$stage KEEP=$results/$stage.tar.xz ./sweep.sh \
    config/which_norm_cpu.py --n_layer=4 --n_embd=128 --n_head=4 --init_std=0.08 --dtype=float32 \
    --study="point_wise $declaration"
}

cd "$code"
[ -f data/stdlib/meta.json ] || "$PYTHON" data/stdlib/prepare.py
case $stage in
  rates)
    for optimizer in ${OPTIMIZERS:-adamw muon}; do
      [ $optimizer = adamw ] && grid="0.002 0.004 0.008" || grid="0.0044 0.0088 0.0176"
      list=
      for arm in ${ARMS:-rms dyt derf}; do
        for rate in ${RATES:-$grid}; do
          list+=" '$arm --optimizer=$optimizer --learning_rate=$rate'"
        done
      done
      sweep $optimizer "$list" 112
    done
    ;;
  pairs)
    optimizer=$1 list=
    shift
    for arm in rms dyt derf; do
      list+=" '$arm --optimizer=$optimizer --learning_rate=$1'"
      shift
    done
    sweep $optimizer "$list" "740 741 742 743"
    ;;
  *) echo "error: $stage: a stage is rates or pairs" >&2; exit 2 ;;
esac
