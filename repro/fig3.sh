#!/usr/bin/env bash
# CoupledNorm's Figure 3 (Loretz & Hochreiter 2026, appendix A): mean RMS before attention and MLP,
# layer by layer.
#
#   repro/fig3.sh TEXT [MODEL ...]    TEXT: jsonl, jsonl.xz, parquet or txt; none: Llama 3.2 1B and
#                                     Qwen3 0.6B, as there
#
# Models are named as everywhere: runs, folders, hub names. Writes RESULTS (results/fig3): a picture
# for each, sizes.jsonl with spread and quantiles, the first token apart, ratios, and what
# posthoc/rms_stats.py suggests. The paper has alpha = 1.09 for Qwen and 1.1 for Llama, and the
# first 1 and 4 layers not coupled.
set -euo pipefail
. "$(dirname "$0")/start.sh"
[ $# -gt 0 ] || { usage; exit 2; }
text=$1 results=${RESULTS:-results/fig3}
shift
[ $# -gt 0 ] || set -- meta-llama/Llama-3.2-1B Qwen/Qwen3-0.6B
mkdir -p "$results"
for model in "$@"; do
  "$PYTHON" -m posthoc.rms_stats "$model" --text="$text" --across \
    --plot="$results/$(basename "$model").png" --out="$results/sizes.jsonl"
done
