#!/usr/bin/env bash
# Table 3 of "Enjoy Your Layer Normalization" beside our counts, and the same for many more architectures.
# Writes results/fold/. A few minutes on two CPU cores; needs transformers.
#
#   repro/cbwc_table3.sh [--key=value ...]        --rules=paper --models=gpt2,bert prints the paper's counts alone
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0; fi
"$PYTHON" repro/cbwc_table3.py --out=results/fold "$@"
