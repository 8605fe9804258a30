#!/usr/bin/env bash
# Which norm? The study of repro/which_norm.toml at one of three scales.
#
#   repro/which_norm.sh cpu               0.8 M parameters in blocks, 2 M bytes: 20 to 30 hours of
#                                         one CPU core with AMX or AMD's AVX512-BF16; many times as
#                                         long without
#   repro/which_norm.sh 30m               10.6 M parameters in blocks, 0.6 B tokens; needs a GPU
#   repro/which_norm.sh 124m              85 M parameters in blocks, 2.5 B tokens; needs GPUs
#
#   repro/which_norm.sh cpu --dry-run     print runs, core-minutes and power, and train nothing
#   repro/which_norm.sh cpu --until=rates stop after this stage
#
# Each start is one worker. It claims one run after the other, so start as many as there are places,
# on any machines with a common folder: `seq 2 | xargs -P 2 -I{} repro/which_norm.sh cpu`, a SLURM
# array, one for each of eight GPUs. A worker that is killed loses nothing that is finished; start it
# again. NPROC gives each run that many GPUs. Runs are trained into OUT (out/which_norm/SCALE);
# finished ones are kept in RESULTS (results/SCALE/which_norm) and are not run again.
set -euo pipefail
. "$(dirname "$0")/start.sh"
[ $# != 0 ] || { usage; exit 2; }
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m repro.which_norm "$@"
