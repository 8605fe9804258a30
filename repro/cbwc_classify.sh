#!/usr/bin/env bash
# LayerNorm, RMSNorm and CBWC + RMSNorm in a small text classification with dropout (section 5.3 of
# the CBWC paper), six seeds, with verdicts. Writes results/cpu/cbwc_classify/. Two minutes on a
# free CPU core.
#
#   repro/cbwc_classify.sh [--key=value ...]
set -euo pipefail
. "$(dirname "$0")/start.sh"
"$PYTHON" -m repro.cbwc --study=classify --out=results/cpu/cbwc_classify "$@"
