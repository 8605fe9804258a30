#!/usr/bin/env bash
# What the centring of LayerNorm does to an MLP (appendix F): input mean and norm of each linear under LayerNorm and
# RMSNorm, plain and with residual connections, on synthetic images. Smaller than the paper's: width 128 for its 256 and
# 512, depth 40 for 65 and 100, 20 epochs for 175; four seeds. Writes results/cpu/cbwc_centering/. Two minutes on a free
# CPU core.
#
#   repro/cbwc_centering.sh [--key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0; fi
"$PYTHON" repro/cbwc_mlp.py --study=centering --width=128 --epochs=20 --plain_depths=6,15 --residual_depths=40 --seeds=4 \
  --out=results/cpu/cbwc_centering "$@"
