#!/usr/bin/env bash
# Which norm? The runs of repro/which_norm.toml, a stage in a shape: calls of sweep.sh.
#
#   repro/which_norm.sh SCALE STAGE SHAPE [--key=value ...]   one worker; start one for each core
#
#   SCALE  cpu   0.8 M parameters in blocks, 2 M bytes: 25 hours of a core with bfloat16 for all stages
#          30m   10.6 M parameters in blocks, 0.6 B tokens; needs a GPU
#          124m  85 M parameters in blocks, 2.5 B tokens; needs GPUs (NPROC gives each run that many)
#   STAGE  rates, margin, verdict, check, tokens or muon
#   SHAPE  W or D
#
#   RATES=0.032 SEEDS=101 ARMS="peri 'rms --qk_norm=head'" repro/which_norm.sh cpu rates W
#       rates beyond the grid, and the second seed at an arm's best two, as the plan's [rates] say
#   python -m repro.which_norm results/cpu/which_norm/rates-W.tar.xz
#       the rate of each arm. Later stages have these; those of cpu stand below, and at another scale
#       ARMS gives them: ARMS="'rms --learning_rate=0.001' ..." (rms first), and an init_std comes last
#
# Runs go to OUT (out/which_norm/SCALE), finished logs to RESULTS (results/SCALE/which_norm), or into
# the archive KEEP. AGAIN=1 trains anew and compares with the committed runs. Workers
# share out the runs, and one that is killed loses one run at most.
set -euo pipefail
. "$(dirname "$0")/start.sh"
[ $# -ge 3 ] || { usage; exit 2; }
scale=$1 stage=$2 shape=$3
shift 3
config=config/which_norm_$scale.py
steps=$(sed -n 's/^max_iters = //p' "$config") warmup=$(sed -n 's/^warmup_iters = //p' "$config")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HELLASWAG=off
export OUT=${OUT:-out/which_norm/$scale}/$stage/$shape
export KEEP=${KEEP:-${RESULTS:-results/$scale/which_norm}/$stage-$shape.tar.xz}
study="${STUDY:-which_norm} $scale $(sha256sum repro/which_norm.toml | cut -c1-16)"

chosen=
case $scale-$shape in
  cpu-*) grid="0.002 0.004 0.008 0.016" ;;
  30m-*) grid="0.0005 0.001 0.002 0.004" ;;
  124m-*) grid="0.0003 0.0006 0.0012 0.0024" ;;
esac
case $scale-$shape in
  cpu-W) layers=4 init_std=0.08 keys="--n_embd=128 --n_head=4" chosen="0.0044 0.0041 0.0038 0.0039 0.0048" ;;
  cpu-D) layers=16 init_std=0.125 keys="--n_embd=64 --n_head=2" chosen="0.0085 0.0057 0.0089 0.0089 0.012" ;;
  30m-W) layers=6 init_std= keys="--n_embd=384 --n_head=6" ;;
  30m-D) layers=24 init_std= keys="--n_embd=192 --n_head=3" ;;
  124m-W) layers=12 init_std= keys="--n_embd=768 --n_head=12" ;;
  124m-D) layers=48 init_std= keys="--n_embd=384 --n_head=6" ;;
  *) echo "error: $scale $shape: a scale is cpu, 30m or 124m, a shape W or D" >&2; exit 2 ;;
esac
for key in "$@"; do [[ $key != --init_std=* ]] || init_std=${key#*=}; done
keys+=" --n_layer=$layers${init_std:+ --init_std=$init_std}"
block_0="coupled --norm_plan='Rs $(printf 'RR %.0s' $(seq 2 $layers))R'"
judged=(rms peri "coupled --coupled_grad=full" "$block_0" "rms --qk_norm=head")
arms=()
if [ -n "${ARMS:-}" ]; then
  mapfile -t arms < <(xargs -n1 printf '%s\n' <<<"$ARMS")
elif [ "$stage" = rates ]; then
  arms=("${judged[@]}" layer coupled "rms --norm_gain=none" olmo2 lns deepnorm dyt taper)
else
  [ -n "$chosen" ] || { echo "error: $scale: no rates yet: give ARMS" >&2; exit 2; }
  rates=($chosen)
  for place in "${!judged[@]}"; do
    arms+=("${judged[place]} --learning_rate=${rates[place]}")
  done
fi

# Have sweep.sh train the arms with the keys $2 behind them, at the seeds $1; later words are common.
sweep() {
  local seeds=$1 more=$2 arm list=
  shift 2
  for arm in "${arms[@]}"; do list+=" \"$arm${more:+ $more}\""; done
  ARMS=$list SEEDS=${SEEDS:-$seeds} ./sweep.sh "$config" $keys "$@" --study="$study"
}

# Give the arms $1 times their rate, and the words $2 before it.
at() {
  local place rate
  for place in "${!arms[@]}"; do
    rate=$(awk "BEGIN {print $1 * ${arms[place]##*=}}")
    arms[place]="${arms[place]% --learning_rate=*}${2:+ $2} --learning_rate=$rate"
  done
}

case $stage in
  rates) for rate in ${RATES:-$grid}; do sweep 100 "--learning_rate=$rate" "$@"; done ;;
  margin)
    arms=("${arms[0]}")
    sweep "150 151 152 153" "" "$@"
    sweep "150 151 152 153" "--max_iters=$((steps / 2)) --warmup_iters=$((warmup / 2))" "$@"
    sweep "150 151 152 153" "--max_iters=$((steps * 2)) --warmup_iters=$((warmup * 2))" "$@"
    ;;
  verdict) sweep "$(echo {200..215})" --planned_seeds=16 "$@" ;;
  check)
    arms=("${arms[@]:0:2}")
    for factor in 0.5 1 2; do
      sweep "300 301 302 303" "--init_std=$(awk "BEGIN {print $factor * $init_std}")" "$@"
    done
    at 0.5 "" && sweep "300 301 302 303" "--init_std=$init_std" "$@"
    at 4 "" && sweep "300 301 302 303" "--init_std=$init_std" "$@"
    ;;
  tokens)
    arms=("${arms[@]:0:3}")
    sweep "400 401 402 403" "--max_iters=$((steps * 4)) --warmup_iters=$((warmup * 4))" "$@"
    ;;
  muon)  # the best of these rates was the highest, for every arm
    arms=("${arms[@]:0:4}")
    at 0.5 --optimizer=muon && sweep 100 "" "$@"
    at 2 "" && sweep 100 "" "$@"
    at 2 "" && sweep "100 500 501 502 503" "" "$@"
    ;;
  *) echo "error: $stage: a stage is rates, margin, verdict, check, tokens or muon" >&2; exit 2 ;;
esac
