#!/usr/bin/env bash
# TaperNorm's pre-training table (Kanavalau, Amo Alonso & Lall 2026, section 5): TinyStories, four
# sizes, six seeds. The paper: tapered internal norms, with the scale loss, end within 0.7 to 1.5 %
# of RMSNorm's val loss.
#
#   repro/taper_table.sh [--key=value ...]    on a GPU, with data/tinystories (config/tinystories.py
#                                             says how). 120 runs; one of the largest takes about
#                                             ten minutes on an H200 (estimate)
#
# Sizes count the weights of the blocks, not the embeddings: 1M (1.2), 5M (4.7), 9M (8.8), 30M
# (31.5). SIZES chooses some of them; SEEDS, ARMS and NPROC are sweep.sh's. Runs that results/ holds
# already are not run again.
set -euo pipefail
. "$(dirname "$0")/start.sh"
out=${OUT:-out/taper_table} keep=${KEEP:-results/$(gpu_name)/taper_table} status=0
internal="taper --taper_warmup=0.5 --taper_end=0.75"
anchor=--taper_anchor=0.1 final=--taper_final=True
arms="rms '$internal' '$internal $anchor' '$internal $final' '$internal $final $anchor'"
export ARMS="${ARMS:-$arms}"
export SEEDS="${SEEDS:-8 9 10 11 12 13}" HELLASWAG=off
declare -A shape=([1M]="6 4 128" [5M]="6 8 256" [9M]="5 6 384" [30M]="10 8 512")
for size in ${SIZES:-1M 5M 9M 30M}; do
  read -r layers heads channels <<<"${shape[$size]:?$size: SIZES are 1M, 5M, 9M and 30M}"
  OUT=$out/$size KEEP=$keep/$size/runs.tar.xz ./sweep.sh config/tinystories.py --n_layer="$layers" \
    --n_head="$heads" --n_embd="$channels" --delta_val_loss=0.02 --delta_train_loss=0.02 "$@" \
    || status=$?
  "$PYTHON" report.py "$keep/$size/runs.tar.xz" --baseline=rms --out="$keep/$size"
done
exit $status
