#!/usr/bin/env bash
# Two leads that nobody judged: one statistic for all blocks, and DeepNorm in the deep shape.
#
#   git worktree add CODE COMMIT                 the code of the runs so far, or HEAD
#   repro/leads.sh CODE rates W|D                the rates; one worker, start one for each core
#   RATES=0.016 ARMS=span repro/leads.sh CODE rates W       an octave more for one arm
#   repro/leads.sh CODE verdict W|D RATE [DEEP RATE]        the judged runs; DEEP is paper or common
#   repro/leads.sh CODE grids W|D                rates that end the grids of rivals.sh
#
# Runs go to OUT (out/leads), finished logs to RESULTS (results/cpu/leads). A worker that is killed
# loses one run at most. SEEDS takes some of the seeds.
#
# The declaration, of 2026-11-28, before the first run. Its SHA-256 is in every run, so nothing here
# may change once a run exists.
# - Question: do `coupled --coupled_span=0 --coupled_calibrate=10` (one calibrated statistic for all
#   blocks; W and D) and `deepnorm` (D) end lower or higher than `rms`? The first beat `rms` twice at
#   a rate that was not tuned for it (results/cpu/variants, results/cpu/span_again); DeepNorm led
#   the two selection seeds of "Which norm?" in D and was not judged.
# - Settings: those of "Which norm?" (config/which_norm_cpu.py; W is 4 x 128 at init_std 0.08, D is
#   16 x 64 at 0.125), but float32 in place of bfloat16. Most processors at hand have no bfloat16
#   products, and with float32 every one can take part. `rms` is run again.
# - Rates: W 0.002, 0.004, 0.008 for span 0. D 0.004, 0.008, 0.016 for span 0, and 0.004, 0.008,
#   0.011 for `deepnorm` with the recipe of its paper and with the common one. Seeds 110 and 111, all
#   rates of an arm and seed on one processor. While the best mean of two seeds is at an end, one
#   octave more there, twice at most. Chosen is the vertex of the parabola in log2 of the rate
#   through the best and its neighbours (`python -m repro.which_norm ARCHIVE`); the best itself where
#   a neighbour diverged. Of the recipes of `deepnorm`, the one whose best mean is lower.
# - Judged: val_loss_full at the last step, nats a byte, arm minus `rms` (0.0044 in W, 0.0085 in D),
#   paired by seed, 720 to 735 in each shape. Three tests (W: span 0; D: span 0 and the chosen
#   `deepnorm`), each shape by itself: paired t, two-sided, Holm over three, 0.05. Before a shape has
#   its 16 seeds it has no verdict.
# - All arms of a seed and shape run on processors of one model. Where that changes, a seed left
#   half done is run again whole.
# - A run that diverges is counted on the page; the arm then has no verdict in that shape but
#   "diverged in k of 16". A seed that ends badly is a seed.
# - Then the ends of three grids in results/cpu/rivals, screened and not judged: `bhyt` at 0.032 in W
#   and D, `gatednorm` at 0.032 in D, `seednorm` at 0.001 in W, seed 100, bfloat16 as the rest of the
#   grids, on a processor that has its products.
set -euo pipefail
. "$(dirname "$0")/start.sh"
[ $# -ge 3 ] || { usage; exit 2; }
declaration=$(sha256sum "$script" | cut -c1-16)
code=$(realpath "$1") stage=$2 shape=$3
shift 3
export OMP_NUM_THREADS=1 HELLASWAG=off PYTHON="$(realpath -s "$PYTHON")"
out=$(realpath -m "${OUT:-out/leads}")
results=$(realpath -m "${RESULTS:-results/cpu/leads}")
mkdir -p "$out" "$results"

case $shape in
  W) keys="--n_layer=4 --n_embd=128 --n_head=4 --init_std=0.08" rms=0.0044 ;;
  D) keys="--n_layer=16 --n_embd=64 --n_head=2 --init_std=0.125" rms=0.0085 ;;
  *) echo "error: $shape: a shape is W or D" >&2; exit 2 ;;
esac
span="coupled --coupled_span=0 --coupled_calibrate=10"

# Train the arms $2 at the seeds $3; $1 names folder and archive. Further words are keys.
sweep() {
  local name=$1 arms=$2 seeds=$3
  shift 3
  ARMS=$arms SEEDS=${SEEDS:-$seeds} OUT=$out/$name KEEP=$results/$name.tar.xz ./sweep.sh \
    config/which_norm_cpu.py $keys "$@" --study="leads $declaration"
}

# Name the arm $1 of the deep shape or of both.
arm() {
  case $1 in
    span) echo "$span" ;;
    paper) echo "deepnorm" ;;
    common) echo "deepnorm --norm_recipe=common" ;;
    *) echo "error: $1: an arm is span, paper or common" >&2; return 2 ;;
  esac
}

# Print the rates that the declaration gives the arm $1.
rates() {
  case $shape-$1 in
    W-span) echo "0.002 0.004 0.008" ;;
    D-span) echo "0.004 0.008 0.016" ;;
    D-*) echo "0.004 0.008 0.011" ;;
    *) echo "error: $1: in W the arm is span alone" >&2; return 2 ;;
  esac
}

cd "$code"
[ -f data/stdlib/meta.json ] || "$PYTHON" data/stdlib/prepare.py
case $stage in
  rates)
    list=
    [ "$shape" = W ] && default=span || default="span paper common"
    for name in ${ARMS:-$default}; do
      for rate in ${RATES:-$(rates "$name")}; do
        list+=" '$(arm "$name") --learning_rate=$rate'"
      done
    done
    sweep "rates-$shape" "$list" "110 111" --dtype=float32
    ;;
  verdict)
    list="'rms --learning_rate=$rms' '$span --learning_rate=$1'"
    [ "$shape" = W ] || list+=" '$(arm "$2") --learning_rate=$3'"
    sweep "verdict-$shape" "$list" "$(echo {720..735})" --dtype=float32 --planned_seeds=16
    ;;
  grids)
    if [ "$shape" = W ]; then
      sweep grids-W "'bhyt --learning_rate=0.032' 'seednorm --learning_rate=0.001'" 100 --dtype=bfloat16
    else
      sweep grids-D "'bhyt --learning_rate=0.032' 'gatednorm --learning_rate=0.032'" 100 --dtype=bfloat16
    fi
    ;;
  *) echo "error: $stage: a stage is rates, verdict or grids" >&2; exit 2 ;;
esac
