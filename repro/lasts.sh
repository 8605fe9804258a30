#!/usr/bin/env bash
# Does it last? At 20 bytes a parameter, is what norms gained or lost in the wide shape still there?
#
#   git worktree add CODE COMMIT              the code of the runs so far, or HEAD
#   SPAN=RATE repro/lasts.sh CODE S           the rates; one worker, start one for each core. RATE is
#                                             what leads.sh found for one statistic in W
#   ARMS="'peri --learning_rate=0.0058'" repro/lasts.sh CODE S     half an octave more for one arm
#   SEEDS=101 ARMS=... repro/lasts.sh CODE S  the second seed, at an arm's best two rates
#   repro/lasts.sh CODE M RATE                what tokens are worth; RATE is that of rms
#   ARMS="'rms --learning_rate=...' ..." repro/lasts.sh CODE A     the judged runs, rms first
#
# Runs go to OUT (out/lasts), finished logs to RESULTS (results/cpu/lasts). A worker that is killed
# loses one run at most. SEEDS takes some of the seeds.
#
# The declaration, of 2026-11-28, before the first run. Its SHA-256 is in every run, so nothing here
# may change once a run exists.
# - Question: at 2.6 bytes a parameter in blocks, in the wide shape, `peri` gained what 6.0 % more
#   tokens buy, one calibrated statistic for all blocks 6.7 %, and `coupled` lost 5.6 %. Is that there
#   at 20 bytes a parameter?
# - Text: data/wheels. What decides is the loss over its validation documents that are those of
#   data/stdlib (the first ones, up to the length of data/stdlib's split); the loss over the files
#   held out of the wheels stands beside it. Both come from the sums of single documents in val_full.
# - Settings: 4 x 128, heads of 32, init_std 0.08, 2,048 bytes a step, 7,680 steps (15.7 M bytes),
#   warm-up 768, decay to zero, rate times decay 3e-4, clip 1, compiled. float32, as in leads.sh and
#   for its reason.
# - Arms: rms, layer, coupled, `coupled --coupled_span=0 --coupled_calibrate=10` (span 0), peri.
# - S, rates: 0.5, 0.71 and 1 times the arm's rate at 2 M tokens (0.0044, 0.0046, 0.0042, that of
#   leads.sh, 0.0041), seed 100; half an octave more at an end that is best, twice at most; seed 101
#   at the best two. Chosen is the vertex of the parabola in log2 of the rate through the best and
#   its neighbours, the loss at a rate as in repro/which_norm.toml. All rates of an arm and seed on
#   one processor.
# - M, slope: rms at its rate, 3,840 and 15,360 steps, a tenth of them warm-up, seeds 150 to 153.
#   s = (mean loss of the short runs - mean loss of the long runs) / ln 4. d = mean paired difference
#   / s: the share of tokens that it is worth, in units of the logarithm.
# - A, verdict: seeds 800 to 819. `peri`, span 0 and `coupled` minus rms: paired t, two-sided, Holm
#   over three, 0.05. `layer`: TOST at what 1 % of the tokens is worth, 0.05, outside that family.
#   "Lasts": Holm's p is below 0.05, on the side that it had at 2 M tokens. "At most half is left":
#   the one-sided 95 % bound of d is above -3.0 % (`peri`), above -3.3 % (span 0), below 2.8 %
#   (`coupled`). Both can hold. If neither does, the question is open.
# - Blind look: when ten seeds are whole, the pooled SD of the paired differences alone is computed,
#   without the names of arms. If it is above 0.012, seeds 820 to 829 are run too, for all arms. No
#   mean is read before the last seed.
# - Tails: a run that ends 0.03 above its arm's median is counted and kept. The p of Wilcoxon's
#   signed-rank test stands beside that of t. If a run diverges, the page says "k of 20", and its arm
#   has no verdict.
# - All arms of a seed run on processors of one model; where that changes, a seed left half done is
#   run again whole. If time ends before the last seed, the page says which seeds ran, and "open".
set -euo pipefail
. "$(dirname "$0")/start.sh"
[ $# -ge 2 ] || { usage; exit 2; }
declaration=$(sha256sum "$script" | cut -c1-16)
code=$(realpath "$1") stage=$2
shift 2
export OMP_NUM_THREADS=1 HELLASWAG=off PYTHON="$(realpath -s "$PYTHON")"
out=$(realpath -m "${OUT:-out/lasts}")
results=$(realpath -m "${RESULTS:-results/cpu/lasts}")
mkdir -p "$out" "$results"

# Train the arms $2 at the seeds $3 for $4 steps; $1 names folder and archive. Further words are
# keys.
sweep() {
  local name=$1 arms=$2 seeds=$3 steps=$4
  shift 4
  ARMS=$arms SEEDS=${SEEDS:-$seeds} OUT=$out/$name KEEP=$results/$name.tar.xz ./sweep.sh \
    config/which_norm_cpu.py --data_dir=data/wheels --n_layer=4 --n_embd=128 --n_head=4 \
    --init_std=0.08 --dtype=float32 --max_iters=$steps --warmup_iters=$((steps / 10)) \
    --eval_interval=$((steps / 8)) "$@" --study="lasts $declaration"
}

cd "$code"
[ -f data/wheels/meta.json ] || "$PYTHON" data/wheels/prepare.py
case $stage in
  S)
    list=${ARMS:-}
    # Add the arm $1 at three rates up to $2.
    three() {
      local factor
      for factor in 0.5 0.71 1; do
        list+=" '$1 --learning_rate=$(awk "BEGIN {printf \"%.2g\", $factor * $2}")'"
      done
    }
    if [ -z "$list" ]; then
      three rms 0.0044
      three layer 0.0046
      three coupled 0.0042
      three "coupled --coupled_span=0 --coupled_calibrate=10" "${SPAN:?needs the rate of span 0}"
      three peri 0.0041
    fi
    sweep S "$list" 100 7680
    ;;
  M)
    for steps in 3840 15360; do sweep M-$steps "'rms --learning_rate=$1'" "150 151 152 153" $steps; done
    ;;
  A) sweep A "${ARMS:?needs the arms with their rates, rms first}" "$(echo {800..819})" 7680 \
    --planned_seeds=20 ;;
  *) echo "error: $stage: a stage is S, M or A" >&2; exit 2 ;;
esac
