#!/usr/bin/env bash
# CoupledNorm's Figure 4 (Loretz & Hochreiter 2026): one step of Qwen3-1.7B at batch 8 under the
# profiler, norms marked; here with both fused arms in addition to the paper's two. On a GPU. Writes
# OUT (results/DEVICE/trace): a Chrome trace for each arm, and a picture; prints kernels per block,
# and whether their number is that of the launch ledger.
#
#   repro/fig4.sh [--key=value ...]
set -euo pipefail
. "$(dirname "$0")/start.sh"
out=${OUT:-results/$(gpu_name)/trace}
"$PYTHON" bench_decode.py "${MODEL:-random:qwen3-1.7b}" --trace --batch=8 --coupled_first=1 \
  --coupled_alpha=1.09 --out="$out" "$@"
