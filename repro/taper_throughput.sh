#!/usr/bin/env bash
# TaperNorm's throughput table (Kanavalau, Amo Alonso & Lall 2026): logits of the last token, about
# 30 M parameters, batches of 1 and 4, contexts of 128, 256 and 512 tokens; eager as published, and
# without the launches that bound it. Writes OUT (results/DEVICE/taper).
#
#   repro/taper_throughput.sh [--key=value ...]
#   OUT=results/cpu/taper repro/taper_throughput.sh --ledger      anywhere
set -euo pipefail
. "$(dirname "$0")/start.sh"
out=${OUT:-results/$(gpu_name)/taper}
"$PYTHON" bench_decode.py --last_token --out="$out" "$@"
