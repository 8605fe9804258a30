#!/usr/bin/env bash
# Every figure that wants an H200, one command each; what is done is not done again.
#
#   repro/h200.sh                        all that is left, in the order in which figures are wanted
#   repro/h200.sh train 'decode-qwen*'   these stages, done before or not
#   repro/h200.sh --list                 the stages, their state, their minutes and their commands
#   MINUTES=9.5 repro/h200.sh            begin nothing that will not be over by then; the same command goes on
#
#   OUT    folder of the figures (results/h200); its README.md sets them beside the aims (repro/h200.py)
#   DATA   token shards to train on (data/offline): data/fineweb_edu/prepare.py --local FILES --val FILES --out_dir=DATA
#   LIMIT  minutes after which a stage is stopped, as by Ctrl-C (9.2): sweeps go on at the next call, benches keep what
#          they have
#
# It needs no network, and the packages of requirements.txt; to distil, peft. Liger-Kernel and quack take part where they
# are installed, nanoGPT and gpt-fast where their clones lie beside this folder (NANOGPT, GPT_FAST). A stage that failed is
# left out until the code is another. Each attempt is a line of OUT/stages.csv: stage, state, seconds, commit, device,
# clocks before and after. What it printed is in out/h200/. Minutes are estimates until then.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0; fi
die() { echo "error: $1" >&2; exit 2; }
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
out=${OUT:-results/h200} data=${DATA:-data/offline} limit=${LIMIT:-9.2} minutes=${MINUTES:-0} scratch=out/h200
nanogpt=${NANOGPT:-../nanoGPT} gpt_fast=${GPT_FAST:-../gpt-fast}
unset ARMS SEEDS OUT KEEP MODEL MODELS NPROC HELLASWAG RESULTS NANONORM_FULL TRITON_INTERPRET  # a stage gets its own
export PYTHON=$python OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
list= only=("$@")
if [ "${1:-}" = --list ]; then list=1 only=("${@:2}"); fi
names=() chosen=() failed=0 child=

seconds() { awk -v minutes="$1" 'BEGIN { printf "%d", 60 * minutes }'; }
clocks() { { nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv,noheader || true; } 2>/dev/null | tr ',\n' '  '; }
state_of() { { grep "^$1," "$out/stages.csv" 2>/dev/null || true; } | tail -n 1 | cut -d, -f"$2"; }

# stage NAME MINUTES COMMAND...: run it, if it is wanted, not done, and there is time
stage() {
  local name=$1 wanted=$2 pattern is_chosen= left status=0 state before start
  shift 2
  names+=("$name")
  for pattern in "${only[@]}"; do
    # shellcheck disable=SC2053
    if [[ $name == $pattern ]]; then is_chosen=1 chosen+=("$pattern"); fi
  done
  [ ${#only[@]} = 0 ] || [ -n "$is_chosen" ] || return 0
  state=$(state_of "$name" 2)
  if [ -n "$list" ]; then printf "%s: %s, %s minutes\n    %s\n" "$name" "${state:-not done}" "$wanted" "${*@Q}"; return; fi
  if [ -z "$is_chosen" ]; then
    [ "$state" != done ] || return 0
    [ "$state" != failed ] || [ "$(state_of "$name" 4)" != "$commit" ] || return 0
  fi
  left=$(seconds "$limit")
  if [ "$minutes" != 0 ]; then
    left=$(($(seconds "$minutes") - SECONDS - 40))  # for the stage to stop, and to render
    if [ "$left" -lt "$(seconds "$wanted")" ] && [[ $name != table1_small ]] || [ "$left" -lt 60 ]; then
      echo "$name: no time left"
      return
    fi
    [ "$left" -lt "$(seconds "$limit")" ] || left=$(seconds "$limit")
  fi
  echo "$name: about $wanted minutes, at most $((left / 60))"
  before=$(clocks) start=$SECONDS
  setsid timeout --preserve-status --signal=INT --kill-after=30 "$left" "$@" >"$scratch/$name.txt" 2>&1 &
  child=$!
  wait "$child" || status=$?
  kill -KILL -- "-$child" 2>/dev/null || true  # what outlives a stage shares no GPU with the next
  child=
  case $status in 0) state=done ;; 130 | 137) state=stopped ;; *) state=failed failed=1 ;; esac
  echo "$name,$state,$((SECONDS - start)),$commit,$device,$before,$(clocks)" >>"$out/stages.csv"
  echo "$name: $state after $(((SECONDS - start) / 60)) minutes"
  [ $state != failed ] || tail -n 12 "$scratch/$name.txt" | sed 's/^/    /'
}
stop() { [ -z "$child" ] || { kill -INT "$child" 2>/dev/null; wait "$child" || true; kill -KILL -- "-$child" 2>/dev/null || true; }; echo "stopped; the same command goes on"; exit 130; }
trap stop INT TERM HUP

if [ -z "$list" ]; then
  mkdir -p "$scratch" "$out"
  exec 9>"$scratch/lock"
  flock -n 9 || die "another campaign, or a stage that has outlived it, still runs in this folder: end it first"
  place=$("$python" -c 'import torch
from common.environment import environment
found = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
print(found["git"] or "", found["device"].replace(",", ""), sep=",")')
  commit=${place%%,*} device=${place#*,}
  [ -n "$commit" ] || die "there is no .git here: say which commit these files are, NANONORM_COMMIT=..."
  case $device in
    cpu*) die "there is no GPU here" ;;
    *H200*) ;;
    *) [ "$out" != results/h200 ] || die "this GPU is a $device: give its figures a folder of their own, OUT=results/..." ;;
  esac
fi

# ------------------------------------------------------------------------------------------------------------- the stages

tests() { stage "$1" "$2" env "${@:4}" "$python" -m pytest -p no:cacheprovider -rf $3; }
train_speed() {  # NAME ARMS WORDS...
  stage "$1" 9 "$python" -m bench.train config/rms.py --batch_size=60 --gradient_accumulation_steps=2 --rounds=40 \
    --ledger=False --profile "--arms=$2" "--out=$out/$1" "${@:3}"
}
decode() {  # BATCH MODEL...
  local batch=$1 model name words
  shift
  for model in "$@"; do
    name=decode-$model words=()
    [ "$batch" = 1 ] || name+=-$batch
    [ ! -f "$gpt_fast/model.py" ] || words+=("--gpt_fast=$gpt_fast")
    if [ "$model" = qwen3-8b ]; then words+=(--arms=A,B,C,D --tokens=64); [ "$batch" -le 32 ] || words+=(--peers=false); fi
    stage "$name" 8 env "MODELS=random:$model" "OUT=$out/decode" repro/fig2.sh "--batch=$batch" --rounds=20 "${words[@]}"
  done
}
kernels() { stage "kernels-$1" 9 "$python" -m bench.kernels "--ops=$2" "--out=$out/kernels/$1"; }
folds() { stage "fold-$1" 6 "$python" -m bench.fold "hf:$1" "${@:2}" --rounds=40 --sequential=50 --modes=eager,compiled,graph "--out=$out/fold/$1.jsonl"; }
distil() {  # MODEL MINUTES: the last line of what it prints is kept, its weights are not
  stage "distill-$1" "$2" sh -c 'rm -rf "$3"; mkdir -p "$4"; "$1" distill.py config/distill_qwen3_0.6b.py \
    --teacher=random:"$2" --dataset=random --eval_blocks=8 --max_iters=10 --warmup_iters=2 --eval_interval=10 --shuffle=64 \
    --out_dir="$3" && "$1" repro/h200.py --keep "$3" "$4/distill.jsonl" "$2"; rm -rf "$3"' \
    distil "$python" "$1" "$scratch/distill-$1" "$out/distill"
}
sweep() {  # NAME MINUTES SCALE
  if [ -z "$list" ] && [ ! -f "$data/meta.json" ]; then echo "$1: left out: there are no token shards in $data"; return; fi
  stage "$1" "$2" env "OUT=$scratch/$1" "KEEP=$out/$1/runs.tar.xz" repro/table1.sh "$3" "--data_dir=$data" --sample_tokens=0
}
models=(qwen3-0.6b qwen3-1.7b qwen3-8b llama3.2-1b llama3.2-3b)
kernel_tests="tests/kernels/test_kernels.py tests/kernels/test_binding.py tests/bench/test_kernels.py tests/kernels/test_decode.py"
main="rms; coupled; coupled coupled_impl=fold"

stage tests-step 3 "$python" -m pytest -p no:cacheprovider -rf -s tests/bench/test_bytes.py tests/bench/test_train.py -k "real_step or clear_line"
tests tests-kernels 6 "-n 12 $kernel_tests" NANONORM_FULL=1/500
tests tests-decode 8 "-n 8 tests/decode/test_graph.py"
if [ -f "$nanogpt/model.py" ]; then train_speed train "$main" "--nanogpt=$nanogpt"; else train_speed train "$main"; fi
decode 1 "${models[@]}"
train_speed train_bfloat16 "$main" --residual=autocast
kernels norms rms_norm,layer_norm,add_rms_norm,taper_norm
kernels coupled shared_rms_scale,add_shared_rms_scale,scaled_gelu,scaled_swiglu
stage taper 5 env "OUT=$out/taper" repro/taper_throughput.sh
for shape in gpt2 bert opt; do folds $shape --batch=2 --lengths=256,1024,4096; done
distil qwen3-0.6b 4
distil qwen3-8b 8
sweep table1_small 30 small
sweep pair_124m 12 pair
train_speed train_kernels "rms kernels=torch; rms kernels=triton; coupled kernels=torch; coupled kernels=triton" --controls=False
stage trace 8 env "OUT=$out/trace" repro/fig4.sh
# Without `layer`, for time: each of an arm's 216 products is tried in some twenty ways.
train_speed train_autotuned "$main; rms-no-mlp-gamma" --residual=autocast --compile_mode=max-autotune-no-cudagraphs --rounds=20 --controls=False
folds bloom --batch=2 --lengths=256,1024,4096
folds vit --batch=32
for batch in 8 32 2 4 16 64 128; do decode $batch "${models[@]}"; done
folds phi --batch=2 --lengths=256,1024,4096  # folds and certifies 2.7 B parameters on the CPU first: minutes, and 60 GB

for pattern in "${only[@]}"; do
  [[ " ${chosen[*]} " == *" $pattern "* ]] || die "$pattern: no such stage: --list shows them"
done
[ -n "$list" ] || "$python" repro/h200.py "$out"
exit $failed
