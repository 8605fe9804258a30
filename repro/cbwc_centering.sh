#!/usr/bin/env bash
# What the centring of LayerNorm does to an MLP (appendix F): input mean and norm of each linear under LayerNorm and
# RMSNorm, plain and with residual connections, on synthetic images; half the paper's smaller width, 40 epochs of its
# 175, six seeds of its one. Writes results/cpu/cbwc_centering/. Ten minutes on a CPU core.
#
#   repro/cbwc_centering.sh [--key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
"$PYTHON" repro/cbwc_mlp.py --study=centering --width=128 --residual_depths=65 --seeds=6 \
  --out=results/cpu/cbwc_centering "$@"
