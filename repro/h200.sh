#!/usr/bin/env bash
# Every figure that needs an H200, one command each; a stage that is done is skipped.
#
#   repro/h200.sh                        all that is left, the most important figures first
#   repro/h200.sh train 'decode-qwen*'   these stages, done before or not
#   repro/h200.sh --list                 the stages, their state, their minutes and their commands
#   MINUTES=9.5 repro/h200.sh            begin nothing that will not be over by then (0: no such
#                                        limit); the same command goes on
#
#   OUT      folder of the figures (results/h200); its README.md sets them beside the aims
#            (repro/h200.py)
#   DATA     token shards to train on (data/offline): data/fineweb_edu/prepare.py --local FILES
#            --val FILES --out_dir=DATA
#   LIMIT    minutes after which a stage is stopped, as by Ctrl-C (9.2)
#   SCRATCH  folder of run folders, and of what the stages print (out/h200)
#
# It needs no network, and the packages of requirements.txt; to distil, peft. Liger-Kernel and quack
# take part where they are installed, nanoGPT and gpt-fast where their clones lie beside this folder
# (NANOGPT, GPT_FAST).
#
# Each attempt is a line of OUT/stages.csv: stage, state, seconds, commit, device, clocks before and
# after. States:
#   done        it is not run again, unless it is named
#   cut short   it was stopped at its limit and kept what it had: fewer rounds than wanted; not run
#               again either
#   stopped     it was stopped at its limit and kept nothing: once more, then only when the code is
#               another. A sweep goes on each time
#   failed      not run again until the code is another
# The minutes are estimates until then.
set -euo pipefail
. "$(dirname "$0")/start.sh"
die() { echo "error: $1" >&2; exit 2; }
seconds() {  # NAME MINUTES
  [[ $2 =~ ^[0-9]+(\.[0-9]+)?$ ]] || die "$1=$2: give minutes, e.g. $1=9.5"
  awk -v minutes="$2" 'BEGIN { printf "%d", 60 * minutes }'
}
python=$PYTHON
out=${OUT:-results/h200} data=${DATA:-data/offline} scratch=${SCRATCH:-out/h200}
limit=$(seconds LIMIT "${LIMIT:-9.2}")  # in seconds, as `end`, which is 0 where there is none
end=$(seconds MINUTES "${MINUTES:-0}")
nanogpt=${NANOGPT:-../nanoGPT} gpt_fast=${GPT_FAST:-../gpt-fast}
jobs=$(($(nproc) > 4 ? $(nproc) - 4 : 1))
[ "$limit" -ge 1 ] || die "LIMIT=$LIMIT: no time for anything: give minutes, e.g. LIMIT=9.2"
[[ $PWD/ != "$(realpath -m "$out")"/* ]] ||
  die "OUT=$out: its README.md would be overwritten: give a folder of its own"
# a stage gets its own
unset ARMS SEEDS OUT KEEP MODEL MODELS NPROC HELLASWAG RESULTS NANONORM_FULL TRITON_INTERPRET
export PYTHON=$python
mode=run only=("$@")
if [ "${1:-}" = --list ]; then mode=list only=("${@:2}"); fi
names=() no_time=() failed=0 child= goes_on= needs= commit=

# ---------------------------------------------------------------------------------------- one stage

is_named() {  # NAME: is it among the words of the command line?
  local pattern
  # shellcheck disable=SC2053
  for pattern in "${only[@]}"; do [[ $1 != $pattern ]] || return 0; done
  return 1
}
attempts() {  # NAME STATE [COMMIT]: how many
  { grep -c "^$1,$2,[0-9]*,${3:-}" "$out/stages.csv" 2>/dev/null || true; } | grep . || echo 0
}
is_left() {  # NAME: neither done, nor hopeless with this code?
  [ "$(attempts "$1" done)" = 0 ] && [ "$(attempts "$1" "cut short")" = 0 ] || return 1
  [ "$(attempts "$1" failed "$commit,")" = 0 ] || return 1
  [ -n "$goes_on" ] || [ "$(attempts "$1" stopped "$commit,")" -lt 2 ]
}
lack() {  # what is not here, and the remedy; empty if all that `needs` names is here
  case $needs in
    "") ;;
    shards)
      [ -f "$data/meta.json" ] ||
        echo "there are no token shards in $data: --help says how to make them"
      ;;
    *)
      "$python" -c "import importlib.util, sys
sys.exit(importlib.util.find_spec('$needs') is None)" >/dev/null ||
      echo "it needs a package: pip install $needs" ;;
  esac
}
# seconds_for MINUTES: how long a stage that is to take so long may take; 0 where it does not fit in
seconds_for() {
  # 40 s: to stop it, and to render
  local left=$((end - SECONDS - 40)) wanted=$((60 * $1 < limit ? 60 * $1 : limit))
  if [ "$end" = 0 ]; then echo "$limit"; return; fi
  [ -z "$goes_on" ] || wanted=150
  if [ "$left" -lt $((wanted - 30)) ] || [ "$left" -lt 1 ]; then
    echo 0
  else
    echo $((left < limit ? left : limit))
  fi
}
clocks() {
  local names=clocks.sm,clocks.mem,power.draw,temperature.gpu
  { nvidia-smi --query-gpu=$names --format=csv,noheader || true; } 2>/dev/null | tr ',\n' '  '
}
note() {  # a line of stages.csv; one that a kill has torn loses no other
  [ -z "$(tail -c 1 "$out/stages.csv" 2>/dev/null)" ] || echo >>"$out/stages.csv"
  echo "$1" >>"$out/stages.csv"
}

# stage NAME MINUTES COMMAND...: run it, if it is wanted, not done, and there is time.
# goes_on=1: what was stopped goes on at the next call;
# needs=shards or a package: left out where that is not here
stage() {
  local name=$1 wanted=$2 state=done why allowed status=0 before start
  shift 2
  names+=("$name")
  [ $mode != names ] || return 0
  [ ${#only[@]} = 0 ] || is_named "$name" || return 0
  if [ $mode = list ]; then
    state=$({ grep "^$name," "$out/stages.csv" 2>/dev/null || true; } | tail -n 1 | cut -d, -f2)
    printf "%s: %s, %s minutes\n    %s\n" "$name" "${state:-not done}" "$wanted" "${*@Q}"
    return
  fi
  is_named "$name" || is_left "$name" || return 0
  why=$(lack)
  if [ -n "$why" ]; then
    echo "$name: left out: $why"
    if is_named "$name"; then failed=1; fi
    return
  fi
  allowed=$(seconds_for "$wanted")
  if [ "$allowed" = 0 ]; then no_time+=("$name"); return; fi
  echo "$name: about $wanted minutes, at most $((allowed / 60))"
  before=$(clocks) start=$SECONDS
  setsid timeout --preserve-status --signal=INT --kill-after=30 "$allowed" "$@" \
    >"$scratch/$name.txt" 2>&1 &
  child=$!
  wait "$child" || status=$?
  kill -KILL -- "-$child" 2>/dev/null || true  # what outlives a stage shares no GPU with the next
  child=
  if [ $((SECONDS - start)) -ge "$allowed" ]; then
    if [ $status = 0 ] && [ -z "$goes_on" ]; then state="cut short"; else state=stopped; fi
  elif [ $status != 0 ]; then
    state=failed
  fi
  note "$name,$state,$((SECONDS - start)),$commit,$device,$before,$(clocks)"
  echo "$name: $state after $(((SECONDS - start) / 60)) minutes"
  case $state$goes_on in  # a sweep that was stopped goes on
    failed* | stopped)
      failed=1
      tail -n 12 "$scratch/$name.txt" | sed 's/^/    /'
      ;;
  esac
}

# --------------------------------------------------------------------------------------- the stages

tests() {  # NAME MINUTES WORDS VARIABLE...
  stage "$1" "$2" env OMP_NUM_THREADS=1 "${@:4}" "$python" -m pytest -p no:cacheprovider -rf $3
}
train_speed() {  # NAME ARMS WORDS...
  stage "$1" 9 "$python" -m bench.train config/rms.py --batch_size=60 \
    --gradient_accumulation_steps=2 --rounds=40 --ledger=False --profile "--arms=$2" \
    "--out=$out/$1" "${@:3}"
}
decode() {  # BATCH MODEL...
  local batch=$1 model name words
  shift
  for model in "$@"; do
    name=decode-$model words=()
    [ "$batch" = 1 ] || name+=-$batch
    [ ! -f "$gpt_fast/model.py" ] || words+=("--gpt_fast=$gpt_fast")
    if [ "$model" = qwen3-8b ]; then
      words+=(--arms=A,B,C,D --tokens=64)
      [ "$batch" -le 32 ] || words+=(--peers=false)
    fi
    stage "$name" 8 env "MODELS=random:$model" "OUT=$out/decode" repro/fig2.sh "--batch=$batch" \
      --rounds=20 "${words[@]}"
  done
}
kernels() { stage "kernels-$1" 9 "$python" -m bench.kernels "--ops=$2" "--out=$out/kernels/$1"; }
folds() {
  stage "fold-$1" 6 "$python" -m bench.fold "hf:$1" "${@:2}" --rounds=40 --sequential=50 \
    --modes=eager,compiled,graph "--out=$out/fold/$1.jsonl"
}
distil() {  # MODEL MINUTES: the last line of its log is kept, its weights are not
  needs=peft stage "distill-$1" "$2" sh -c 'rm -rf "$3"; mkdir -p "$4"; status=0
    # its log has the figures before its end
    "$1" distill.py config/distill_qwen3_0.6b.py --teacher=random:"$2" --dataset=random \
      --eval_blocks=8 --max_iters=10 --warmup_iters=2 --eval_interval=10 --shuffle=64 \
      --out_dir="$3" || true
    "$1" repro/h200.py --keep "$3" "$4/distill.jsonl" "$2" || status=$?
    rm -rf "$3"; exit $status' distil "$python" "$1" "$scratch/distill-$1" "$out/distill"
}
sweep() {  # NAME MINUTES SCALE
  goes_on=1 needs=shards stage "$1" "$2" env "OUT=$scratch/$1" "KEEP=$out/$1/runs.tar.xz" \
    repro/table1.sh "$3" "--data_dir=$data" --sample_tokens=0
}
models=(qwen3-0.6b qwen3-1.7b qwen3-8b llama3.2-1b llama3.2-3b)
kernel_tests="tests/kernels/test_kernels.py tests/kernels/test_binding.py"
kernel_tests+=" tests/bench/test_kernels.py tests/kernels/test_decode.py"
main="rms; coupled; coupled coupled_impl=fold"

every_stage() {
  stage tests-step 3 env OMP_NUM_THREADS=1 "$python" -m pytest -p no:cacheprovider -rf -s \
    tests/bench/test_bytes.py tests/bench/test_train.py -k "real_step or clear_line"
  tests tests-kernels 6 "-n $jobs $kernel_tests" NANONORM_FULL=1/500
  tests tests-decode 8 "-n 8 tests/decode/test_graph.py"
  if [ -f "$nanogpt/model.py" ]; then
    train_speed train "$main" "--nanogpt=$nanogpt"
  else
    train_speed train "$main"
  fi
  decode 1 "${models[@]}"
  train_speed train_bfloat16 "$main" --residual=autocast
  kernels norms rms_norm,layer_norm,add_rms_norm,taper_norm
  kernels sandwich norm_add_norm,add_normed
  kernels coupled shared_rms_scale,add_shared_rms_scale,scaled_gelu,scaled_swiglu
  stage taper 5 env "OUT=$out/taper" repro/taper_throughput.sh
  for shape in gpt2 bert opt; do folds $shape --batch=2 --lengths=256,1024,4096; done
  distil qwen3-0.6b 4
  distil qwen3-8b 8
  sweep table1_small 30 small
  sweep pair_124m 12 pair
  train_speed train_kernels \
    "rms kernels=torch; rms kernels=triton; coupled kernels=torch; coupled kernels=triton" \
    --controls=False
  stage trace 8 env "OUT=$out/trace" repro/fig4.sh
  folds bloom --batch=2 --lengths=256,1024,4096
  folds vit --batch=32
  for batch in 8 32 2 4 16 64 128; do decode $batch "${models[@]}"; done
  # folds and certifies 2.7 B parameters on the CPU first: minutes, and 60 GB
  folds phi --batch=2 --lengths=256,1024,4096
}

# ------------------------------------------------------------------------------------- the campaign

mode=names every_stage
for pattern in "${only[@]}"; do
  # shellcheck disable=SC2053
  for name in "${names[@]}"; do [[ $name != $pattern ]] || continue 2; done
  die "$pattern: no such stage: --list shows them"
done
if [ $mode = list ]; then every_stage; exit 0; fi

place=$("$python" -c 'import torch
from common.environment import environment
found = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
print(found["git"] or "", found["device"].replace(",", ""), sep=",")')
commit=${place%%,*} device=${place#*,}
[ -n "$commit" ] ||
  die "there is no .git here: say which commit these files are, NANONORM_COMMIT=..."
case $device in
  cpu*) die "there is no GPU here" ;;
  *H200*) ;;
  *) [ "$(realpath -m "$out")" != "$PWD/results/h200" ] ||
    die "this GPU is a $device: give its figures a folder of their own, OUT=results/..." ;;
esac
mkdir -p "$scratch" "$out"
exec 9>"$scratch/lock"
flock -n 9 ||
  die "another campaign, or a stage that has outlived it, still runs in this folder: end it first"
stop() {
  trap '' INT TERM HUP
  if [ -n "$child" ]; then
    kill -INT "$child" 2>/dev/null
    wait "$child" || true
    kill -KILL -- "-$child" 2>/dev/null || true
  fi
  echo "stopped; the same command goes on"
  exit 130
}
trap stop INT TERM HUP
every_stage
[ ${#no_time[@]} = 0 ] || echo "no time left for: ${no_time[*]}"
"$python" repro/h200.py "$out"
exit $failed
