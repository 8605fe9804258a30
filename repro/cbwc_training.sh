#!/usr/bin/env bash
# CBWC + RMSNorm trains as LayerNorm does: an MLP of depth 6 and width 256 over 40 epochs (appendix H.4.1), on synthetic
# images, 200 steps by SGD and AdamW, in float64 and float32. Writes results/cpu/cbwc_training/. A minute on a CPU core.
#
#   repro/cbwc_training.sh [--key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0; fi
"$PYTHON" repro/cbwc_mlp.py --study=training --images=1280 --out=results/cpu/cbwc_training "$@"
