#!/usr/bin/env bash
# LayerNorm and plain coupled, which "Which norm?" did not judge: 32 pairs each, at its settings.
#
#   git worktree add CODE 8432f66            the code of the verdict runs
#   repro/layer_coupled.sh CODE [W|D ...]    one worker, both shapes; start one for each core
#
# Runs go to OUT (out/layer_coupled), finished logs to RESULTS (results/cpu/layer_coupled). A worker
# that is killed loses one run at most.
#
# The declaration, of 2026-11-25, before the first run. Its SHA-256 is in every run, so nothing
# here may change once a run exists.
# - Question: does `layer`, or `coupled`, end lower or higher than `rms`? Arms have the rates that
#   stage `rates` of repro/which_norm.toml chose for them; seeds are those of its verdicts.
# - Deviation: float32 in place of bfloat16, and `rms` is run again. The processor at hand has no
#   bfloat16 products (0.3 k tokens/s against 8 k), so no run here pairs with a run of the
#   verdicts. All arms of a seed and shape run on processors of one model; where that
#   changes, the seed is repeated whole.
# - Judged: val_loss_full at the last step, nats per token, arm minus `rms`, paired by seed. One
#   family of four tests (two arms, each shape by itself): paired t tests, two-sided, Holm, 0.05.
#   Beside it TOST at the 2 % of tokens of each shape, 0.0073 nats in W and 0.0094 in D: four
#   tests, Holm, 0.05. Before a shape has all of its 16 seeds it has no verdict.
# - A run that diverges is counted on the card; the arm then has no verdict in that shape but
#   "diverged in k of 16". A seed that ends badly is a seed.
set -euo pipefail
. "$(dirname "$0")/start.sh"
[ $# != 0 ] || { usage; exit 2; }
declaration=$(sha256sum "$script" | cut -c1-16)
code=$(realpath "$1")
shift
export OMP_NUM_THREADS=1 HELLASWAG=off SEEDS="$(echo {200..215})" PYTHON="$(realpath -s "$PYTHON")"
out=$(realpath -m "${OUT:-out/layer_coupled}")
results=$(realpath -m "${RESULTS:-results/cpu/layer_coupled}")
mkdir -p "$out" "$results"

# Train all seeds of the shape $1 with the rates $2 of rms, $3 of layer and $4 of coupled; the other
# words are keys of the shape.
sweep() {
  local shape=$1
  local arms="'rms --learning_rate=$2' 'layer --learning_rate=$3' 'coupled --learning_rate=$4'"
  shift 4
  ARMS=$arms OUT=$out/$shape KEEP=$results/$shape.tar.xz ./sweep.sh config/which_norm_cpu.py "$@" \
    --dtype=float32 --planned_seeds=16 --study="layer_coupled $declaration"
}

cd "$code"
[ -f data/stdlib/meta.json ] || "$PYTHON" data/stdlib/prepare.py
[ $# != 0 ] || set -- W D
for shape in "$@"; do
  case $shape in
    W) sweep W 0.0044 0.0046 0.0042 --n_layer=4 --n_embd=128 --n_head=4 --init_std=0.08 ;;
    D) sweep D 0.0085 0.0069 0.0088 --n_layer=16 --n_embd=64 --n_head=2 --init_std=0.125 ;;
    *) echo "error: $shape: a shape is W or D" >&2; exit 2 ;;
  esac
done
