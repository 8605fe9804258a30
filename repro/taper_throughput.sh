#!/usr/bin/env bash
# TaperNorm's throughput table (Kanavalau, Amo Alonso & Lall 2026): logits of the last token, about 30 M parameters,
# batches of 1 and 4, contexts of 128, 256 and 512 tokens; eager as published, and without the launches that bound it.
# Writes results/h200/taper/ (or OUT).
#
#   repro/taper_throughput.sh [--key=value ...]      anywhere: OUT=results/cpu/taper repro/taper_throughput.sh --ledger
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0; fi
"$PYTHON" bench_decode.py --last_token --out="${OUT:-results/h200/taper}" "$@"
