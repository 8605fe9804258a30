#!/usr/bin/env bash
# Every figure that wants a GPU, one command each; what is done is skipped. Their programs ran on an
# H200 (results/h200), this script has not yet.
#
#   repro/gpu.sh                         the names of the stages
#   repro/gpu.sh first                   ten minutes: what a new GPU should tell first
#   repro/gpu.sh STAGE [STAGE ...]       these, in the order of the list; patterns too: 'decode-*'
#   repro/gpu.sh '*'                     all, the most important figures first
#
#   OUT      folder of the results (results/DEVICE, such as results/h100)
#   DATA     token shards to train on (data/offline): data/prepare.py FILES --val=FILES --out_dir=DATA
#   SCRATCH  run folders, and what the stage that runs now has printed (out/gpu)
#
# A stage is done once OUT/log/STAGE.txt is there: commit, versions and device, the command, and what
# it printed. Remove that file to run it again. Ctrl-C stops all; then a sweep continues at the next
# call, another stage begins again.
#
# It needs a GPU, of 100 GB or more for all stages (an estimate), no network, and the packages of
# requirements.txt; to distil, peft. Liger-Kernel, quack, flash-attn and TransformerEngine take part
# where they are installed, nanoGPT and gpt-fast where their clones lie beside this folder (NANOGPT,
# GPT_FAST).
set -euo pipefail
. "$(dirname "$0")/start.sh"
data=${DATA:-data/offline} scratch=${SCRATCH:-out/gpu}
nanogpt=${NANOGPT:-../nanoGPT} gpt_fast=${GPT_FAST:-../gpt-fast}
jobs=$(($(nproc) > 4 ? $(nproc) - 4 : 1)) gpus=$({ nvidia-smi -L || true; } 2>/dev/null | wc -l)
only=("$@") names=() failed=0 out=
[ "${1:-}" != first ] || only=('first-*' "${@:2}")

stage() {  # NAME COMMAND...: run it, if it is wanted and not done; without `out` note its name
  local name=$1 pattern wanted=
  shift
  for pattern in "${only[@]}"; do
    # shellcheck disable=SC2053
    [[ $name != $pattern ]] || wanted=1
  done
  if [ -z "$out" ]; then names+=("$name"); return; fi
  [ -n "$wanted" ] || return 0
  if [ -f "$out/log/$name.txt" ]; then echo "$name: done before"; return; fi
  echo "$name: $*"
  if { echo "$place"; echo "${*@Q}"; "$@"; } >"$scratch/$name.txt" 2>&1; then
    mv "$scratch/$name.txt" "$out/log/"
  else
    failed=1
    echo "$name: failed"
    tail -n 12 "$scratch/$name.txt" | sed 's/^/    /'
  fi
}

# ------------------------------------------------------------------------------- the first minutes

first_sync() {  # where does a step wait for the GPU?
  rm -rf "$scratch/first-sync"
  "$PYTHON" -m repro.gpu_first sync train config/rms.py --max_iters=15 --warmup_iters=5 \
    --eval_tokens=49152 --sample_tokens=0 "--data_dir=$data" "--out_dir=$scratch/first-sync"
}
first_steps() {  # NAME SETTING...
  stage "$1" "$PYTHON" "${@:2}" config/rms.py --batch_size=60 --gradient_accumulation_steps=2 \
    "--arms=rms; rms residual=autocast" --controls=False --profile --rounds=8 \
    "--out=$out/$1"
}
first_minutes() {
  local warps residual whole
  # Which kernels does attention run with, where heads are grouped: with a mask (l) and causal (g)?
  stage first-attention "$PYTHON" -m bench.train config/rms.py --n_layer=2 --n_kv_head=4 \
    --window=256 --local_blocks=lg --batch_size=8 --gradient_accumulation_steps=1 --compile=False \
    --arms=rms --controls=False --profile --rounds=2 "--out=$out/first-attention"
  # side by side: each case of the second file compiles a step
  stage first-tests "${pytest[@]}" -x -n "$jobs" tests/kernels/test_binding.py \
    tests/decode/test_graph.py
  stage first-sync first_sync
  stage first-kernels "$PYTHON" -m bench.kernels --channels=768,2048 --rounds=10 \
    --ops=rms_norm,taper_norm,norm_add_norm,scaled_gelu "--out=$out/first-kernels"
  stage first-kernels-aten "$PYTHON" -m repro.gpu_first aten bench.kernels --channels=768,2048 \
    --ops=rms_norm --rounds=10 "--out=$out/first-kernels-aten"
  # From 24 to 28 a step proves that the second wave of programs is half empty.
  for warps in 20 24 28 32; do
    stage "first-warps-$warps" "$PYTHON" -m repro.gpu_first "warps=$warps" bench.kernels \
      --ops=taper_norm --channels=768 --rows=65536 --rounds=10 "--out=$out/first-warps-$warps"
  done
  first_steps first-steps -m bench.train
  first_steps first-steps-cudnn -m repro.gpu_first cudnn bench.train
  # beside the ledger: the microseconds of a launch
  stage first-decode "$PYTHON" bench_decode.py random:llama3.2-1b --arms=A,C --peers=false \
    --rounds=8 "--out=$out/first-decode"
  [ "$gpus" -ge 8 ] || return 0
  for residual in float32 autocast; do
    for whole in True False; do
      stage "first-ddp-$residual-$whole" first_ddp "$residual" "$whole"
    done
  done
}
first_ddp() {  # RESIDUAL OPTIMIZE: before any study on eight GPUs
  rm -rf "$scratch/first-ddp"
  "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node=8 -m repro.gpu_first \
    "optimize_ddp=$2" train config/rms.py --max_iters=30 --warmup_iters=5 --eval_tokens=393216 \
    --sample_tokens=0 "--residual=$1" "--data_dir=$data" "--out_dir=$scratch/first-ddp"
}

# -------------------------------------------------------------------------------------- the stages

train_speed() {  # NAME ARMS WORDS...
  stage "$1" "$PYTHON" -m bench.train config/rms.py --batch_size=60 \
    --gradient_accumulation_steps=2 --rounds=40 --profile "--arms=$2" \
    "--out=$out/$1" "${@:3}"
}
decode() {  # BATCH
  local model name words
  for model in qwen3-0.6b qwen3-1.7b qwen3-8b llama3.2-1b llama3.2-3b; do
    name=decode-$model words=()
    [ "$1" = 1 ] || name+=-$1
    [ ! -f "$gpt_fast/model.py" ] || words+=("--gpt_fast=$gpt_fast")
    if [ "$model" = qwen3-8b ]; then
      words+=(--arms=A,B,C,D --tokens=64)
      [ "$1" -le 32 ] || words+=(--peers=false)
    fi
    stage "$name" env "MODELS=random:$model" "OUT=$out/decode" repro/fig2.sh "--batch=$1" \
      --rounds=20 "${words[@]}"
  done
}
kernels() { stage "kernels-$1" "$PYTHON" -m bench.kernels "--ops=$2" "--out=$out/kernels/$1"; }
folds() {
  stage "fold-$1" "$PYTHON" -m bench.fold "hf:$1" "${@:2}" --rounds=40 --sequential=50 \
    --modes=eager,compiled,graph "--out=$out/fold/$1.jsonl"
}
distil() {  # MODEL: its log is kept, its weights are not
  local status=0
  rm -rf "$scratch/distill"
  mkdir -p "$out/distill"
  "$PYTHON" distill.py config/distill_qwen3_0.6b.py "--teacher=random:$1" --dataset=random \
    --eval_blocks=8 --max_iters=10 --warmup_iters=2 --eval_interval=10 --shuffle=64 \
    "--out_dir=$scratch/distill" || status=$?
  cp "$scratch/distill/log.jsonl" "$out/distill/$1.jsonl" || status=1
  rm -rf "$scratch/distill"
  return $status
}
sweep() {  # NAME SCALE
  stage "$1" env "OUT=$scratch/$1" "KEEP=$out/$1/runs.tar.xz" repro/table1.sh "$2" \
    "--data_dir=$data" --sample_tokens=0
}
pytest=(env OMP_NUM_THREADS=1 "$PYTHON" -m pytest -p no:cacheprovider -rf)
arms="rms; coupled; coupled coupled_impl=fold"

every_stage() {
  local words=() shape batch
  [ ! -f "$nanogpt/model.py" ] || words=("--nanogpt=$nanogpt")
  first_minutes
  stage tests-step "${pytest[@]}" -s tests/bench/test_bytes.py -k real_step
  stage tests-kernels env NANONORM_FULL=1/500 "${pytest[@]}" -n "$jobs" \
    tests/kernels/test_kernels.py tests/kernels/test_binding.py tests/bench/test_kernels.py \
    tests/kernels/test_decode.py
  stage tests-decode "${pytest[@]}" -n 8 tests/decode/test_graph.py
  train_speed train "$arms" "${words[@]}"
  decode 1
  train_speed train_bfloat16 "$arms" --residual=autocast
  kernels norms rms_norm,layer_norm,add_rms_norm,taper_norm
  kernels sandwich norm_add_norm,add_normed
  kernels coupled shared_rms_scale,add_shared_rms_scale,scaled_gelu,scaled_swiglu
  stage taper env "OUT=$out/taper" repro/taper_throughput.sh
  for shape in gpt2 bert opt; do folds $shape --batch=2 --lengths=256,1024,4096; done
  stage distill-qwen3-0.6b distil qwen3-0.6b
  stage distill-qwen3-8b distil qwen3-8b
  sweep table1_small small
  sweep pair_124m pair
  train_speed train_kernels \
    "rms kernels=torch; rms kernels=triton; coupled kernels=torch; coupled kernels=triton" \
    --controls=False
  stage trace env "OUT=$out/trace" repro/fig4.sh
  folds bloom --batch=2 --lengths=256,1024,4096
  folds vit --batch=32
  for batch in 8 32 2 4 16 64 128; do decode $batch; done
  # folds and certifies 2.7 B parameters on the CPU first: minutes, and 60 GB
  folds phi --batch=2 --lengths=256,1024,4096
}

every_stage  # names alone
if [ $# = 0 ]; then printf '%s\n' "${names[@]}"; exit; fi
for pattern in "${only[@]}"; do
  # shellcheck disable=SC2053
  for name in "${names[@]}"; do [[ $name != $pattern ]] || continue 2; done
  echo "error: $pattern: no such stage: without arguments this prints their names" >&2
  exit 2
done
out=${OUT:-results/$(gpu_name)}
# a stage gets its own
unset ARMS SEEDS OUT KEEP MODEL MODELS NPROC HELLASWAG RESULTS NANONORM_FULL TRITON_INTERPRET
export PYTHON
place=$("$PYTHON" -c 'import json, torch
from common.environment import environment
order = torch._C._get_sdp_priority_order()  # of torch.nn.attention.SDPBackend
print(json.dumps(environment(torch.device("cuda")) | {"attention": order}))')
mkdir -p "$scratch" "$out/log"
trap 'exit 130' INT TERM  # what a bench keeps of an interrupted measurement is not the stage
every_stage
exit $failed
