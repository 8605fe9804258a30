#!/usr/bin/env bash
# What the centring of LayerNorm does to an MLP (appendix F): input mean and norm of each linear
# under LayerNorm and RMSNorm, plain and with residual connections, on synthetic images. Smaller
# than the paper's: width 128 for its 256 and 512, depth 40 for 65 and 100, 20 epochs for 175; four
# seeds. Writes results/cpu/cbwc_centering/. Two minutes on a free CPU core.
#
#   repro/cbwc_centering.sh [--key=value ...]
set -euo pipefail
. "$(dirname "$0")/start.sh"
"$PYTHON" -m repro.cbwc --study=centering --width=128 --epochs=20 --plain_depths=6,15 \
  --residual_depths=40 --seeds=4 --out=results/cpu/cbwc_centering "$@"
