#!/usr/bin/env bash
# CoupledNorm's Figure 2 (Loretz & Hochreiter 2026, section 5.1): speed-up of decoding over batch
# size, for the paper's five shapes with random weights, and what the paper does not show: exact
# RMSNorm with the same fusion (D/C). As in the paper (section 5.3, Figure 3) the first blocks are
# not coupled, 1 of Qwen and 4 of Llama, and alpha is 1.09 and 1.1. On a GPU with 100 GB or more
# (all arms of an 8B model and their caches at batch 128, an estimate). Writes OUT
# (results/DEVICE/decode, such as results/h100/decode). Not timed yet.
#
#   repro/fig2.sh [--key=value ...]         MODELS="random:qwen3-0.6b path/to/Qwen3-0.6B" for others
#   repro/fig2.sh --gpt_fast=../gpt-fast    compare with gpt-fast's own model, for Llama's shapes
set -euo pipefail
. "$(dirname "$0")/start.sh"
out=${OUT:-results/$(gpu_name)/decode}
models=${MODELS:-random:qwen3-0.6b random:qwen3-1.7b random:qwen3-8b \
  random:llama3.2-1b random:llama3.2-3b}
for model in $models; do
  case $(basename "$model" | tr '[:upper:]' '[:lower:]') in
    *qwen*) paper="--coupled_first=1 --coupled_alpha=1.09" ;;
    *llama*) paper="--coupled_first=4 --coupled_alpha=1.1" ;;
    *) paper="" ;;
  esac
  # shellcheck disable=SC2086
  "$PYTHON" bench_decode.py "$model" --arms=A,B,C,D,E --batch=1,2,4,8,16,32,64,128 $paper \
    --out="$out" "$@"
done
