#!/usr/bin/env bash
# CoupledNorm's rivals, screened and not judged: stage rates of repro/which_norm.sh with other arms.
#
#   repro/rivals.sh W [--key=value ...]    four rates, seed 100, in shape W or D; one worker
#   RATES="0.004 0.008" SEEDS=101 ARMS=bhyt repro/rivals.sh W    a second seed at an arm's best two
#
# Runs go to OUT (out/rivals), finished logs to RESULTS (results/cpu/rivals), or into the archive KEEP.
# AGAIN=1 trains anew and compares with the committed runs.
set -euo pipefail
. "$(dirname "$0")/start.sh"
[ $# != 0 ] || { usage; exit 2; }
gated="gatednorm 'gatednorm --gate_start=identity'"
export ARMS=${ARMS:-"rms coupled bhyt $gated seednorm 'rms --paired_gains=0.125'"}
export KEEP=${KEEP:-} OUT=${OUT:-out/rivals} RESULTS=${RESULTS:-results/cpu/rivals} STUDY=rivals
exec repro/which_norm.sh cpu rates "$@"
