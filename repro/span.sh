#!/usr/bin/env bash
# One statistic for 1, 2, 3 or all blocks: the future work that CoupledNorm's paper names (Loretz &
# Hochreiter 2026).
#
#   repro/span.sh   0.84 M parameters, byte level, 4 blocks, seeds 8 to 15: the settings of
#                   `repro/table1.sh cpu`, whose rms and coupled runs are compared. 32 more runs, of
#                   four minutes on a free CPU core
#
# alpha of every shared position is set to the measured drift every 10 steps (coupled_calibrate).
# Without that, two blocks train badly and all of them diverge:
# results/cpu/span/uncalibrated.tar.xz. Runs that results/ holds already are not run again. Further
# arguments go to train.py.
set -euo pipefail
. "$(dirname "$0")/start.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HELLASWAG=off OUT=${OUT:-out/span} \
  KEEP=${KEEP:-results/cpu/span/runs.tar.xz}
calibrated=--coupled_calibrate=10
arms="coupled 'coupled $calibrated'"
for span in 2 3 0; do
  arms="$arms 'coupled --coupled_span=$span $calibrated'"
done
arms=${ARMS:-$arms}
[ -f data/stdlib/meta.json ] || "$PYTHON" data/stdlib/prepare.py
folder=$(dirname "$KEEP")
ARMS=rms KEEP=$folder/rms.tar.xz ./sweep.sh config/table1_cpu.py "$@"
ARMS=$arms ./sweep.sh config/table1_cpu.py "$@"
"$PYTHON" report.py "$KEEP" "$folder/rms.tar.xz" --baseline=rms --out="$folder"
"$PYTHON" report.py "$KEEP" --baseline=coupled --pictures=False --out="$folder/against_coupled"
