#!/usr/bin/env bash
# LayerNorm, RMSNorm and CBWC + RMSNorm in a small text classification with dropout (section 5.3 of the CBWC paper), six
# seeds, with verdicts. Writes results/cpu/cbwc_classify/. Two minutes on a free CPU core.
#
#   repro/cbwc_classify.sh [--key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0; fi
"$PYTHON" repro/cbwc_classify.py --out=results/cpu/cbwc_classify "$@"
