#!/usr/bin/env bash
# CoupledNorm's Figure 4 (Loretz & Hochreiter 2026): one step of Qwen3-1.7B at batch 8 under the profiler, norms flagged;
# here with both fused arms beside the paper's two. On a GPU. Writes results/h200/trace/ (or OUT): a Chrome trace for
# each arm, a picture; prints kernels per block, and whether they are as many as the launch ledger counts.
#
#   repro/fig4.sh [--key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0; fi
"$PYTHON" bench_decode.py "${MODEL:-random:qwen3-1.7b}" --trace --batch=8 --coupled_first=1 \
  --coupled_alpha=1.09 --out="${OUT:-results/h200/trace}" "$@"
