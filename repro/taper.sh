#!/usr/bin/env bash
# Norms tapered away while a small model trains (Kanavalau, Amo Alonso & Lall 2026, section 5),
# eight seeds an arm.
#
#   repro/taper.sh   0.84 M parameters, byte level, 2 M tokens, the settings of `repro/table1.sh
#                    cpu`. 48 runs of three to four minutes on a free CPU core. Arms: RMSNorm;
#                    internal norms tapered away, without and with the scale loss; all norms,
#                    without and with it; internal norms dropped at once, where the others are half
#                    gone
#
# The margin is 1.5 % of RMSNorm's val loss at this scale, declared before any run. Further
# arguments go to train.py. Runs that results/ holds already are not run again; with another
# KEEP=FILE.tar.xz they are.
set -euo pipefail
. "$(dirname "$0")/start.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HELLASWAG=off OUT=${OUT:-out/taper} \
  KEEP=${KEEP:-results/cpu/taper/runs.tar.xz}
internal="taper --taper_warmup=0.5 --taper_end=0.75"
anchor=--taper_anchor=0.1 final=--taper_final=True
arms="rms '$internal' '$internal $anchor' '$internal $final' '$internal $final $anchor'"
abrupt="taper --taper_warmup=0.625 --taper_end=0.625"
export ARMS="${ARMS:-"$arms '$abrupt'"}"
[ -f data/stdlib/meta.json ] || "$PYTHON" data/stdlib/prepare.py
status=0
./sweep.sh config/table1_cpu.py --delta_val_loss=0.0234 --delta_train_loss=0.0234 "$@" || status=$?
"$PYTHON" report.py "$KEEP" --baseline=rms --out="$(dirname "$KEEP")"
[[ $ARMS != *"$abrupt"* ]] || "$PYTHON" report.py "$KEEP" --baseline="$abrupt" --pictures=False \
  --out="$(dirname "$KEEP")/against_abrupt"
exit $status
