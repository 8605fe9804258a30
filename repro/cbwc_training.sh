#!/usr/bin/env bash
# CBWC + RMSNorm trains as LayerNorm does: an MLP of depth 6 and width 256 over 40 epochs (appendix
# H.4.1), on synthetic images, 200 steps by SGD and AdamW, in float64 and float32. Writes
# results/cpu/cbwc_training/. A minute on a CPU core.
#
#   repro/cbwc_training.sh [--key=value ...]
set -euo pipefail
. "$(dirname "$0")/start.sh"
"$PYTHON" -m repro.cbwc --study=training --images=1280 --out=results/cpu/cbwc_training "$@"
