#!/usr/bin/env bash
# Every figure that wants a GPU, one command each; what is done is skipped. Their programs ran on an
# H200 (results/h200), this script has not yet.
#
#   repro/gpu.sh                         the names of the stages
#   repro/gpu.sh quarter                 ten minutes: what a new GPU should tell first. The same
#                                        command again goes on
#   repro/gpu.sh STAGE [STAGE ...]       these, in the order of the list; patterns too: 'decode-*'
#   repro/gpu.sh '*'                     all, the most important figures first
#
#   OUT      folder of the results (results/DEVICE, such as results/h100)
#   DATA     token shards to train on (data/offline): data/prepare.py FILES --val=FILES --out_dir=DATA
#   SCRATCH  run folders and compiled code (out/gpu)
#   MINUTES  time for this call (quarter: 10, else without end); PACE=150 gives the stages of quarter
#            150 percent of their times
#
# A stage is done once OUT/log/STAGE.txt is there: commit, versions and device, the command, and what
# it printed. Remove that file to run it again. Until then, and where it fails, the text is in
# STAGE.unfinished.txt. A stage of quarter that is late gets SIGINT, and keeps what it has measured.
# Ctrl-C and SIGTERM stop all in that way; then a sweep continues at the next call, another stage
# begins again.
#
# It needs a GPU, of 100 GB or more for all stages (an estimate), no network, and the packages of
# requirements.txt; to distil, peft. Liger-Kernel, quack, flash-attn and TransformerEngine take part
# where they are installed, nanoGPT and gpt-fast where their clones lie beside this folder (NANOGPT,
# GPT_FAST).
set -euo pipefail
. "$(dirname "$0")/start.sh"
data=${DATA:-data/offline} scratch=${SCRATCH:-out/gpu} pace=${PACE:-100}
nanogpt=${NANOGPT:-../nanoGPT} gpt_fast=${GPT_FAST:-../gpt-fast}
jobs=$(($(nproc) > 4 ? $(nproc) - 4 : 1)) gpus=$({ nvidia-smi -L || true; } 2>/dev/null | wc -l)
only=("$@") names=() failed=0 out= limit=0 child= watch=
if [ "${1:-}" = quarter ]; then
  only=('quarter-*' "${@:2}")
  MINUTES=${MINUTES:-10}
fi

stage() {  # NAME COMMAND...: run it, if it is wanted and not done; without `out` note its name
  local name=$1 pattern wanted='' log left end=$((limit * pace / 100)) status=0
  shift
  for pattern in "${only[@]}"; do
    # shellcheck disable=SC2053
    [[ $name != $pattern ]] || wanted=1
  done
  if [ -z "$out" ]; then names+=("$name"); return; fi
  [ -n "$wanted" ] || return 0
  log=$out/log/$name
  if [ -f "$log.txt" ]; then echo "$name: done before"; return; fi
  if [ -n "${MINUTES:-}" ]; then
    left=$((60 * MINUTES - SECONDS - 20))  # what is cut may take a moment
    [ "$end" -gt 0 ] && [ "$end" -lt "$left" ] || end=$left
    if [ "$left" -lt 20 ]; then
      failed=1
      echo "$name: no time is left"
      return
    fi
  fi
  echo "$name: $*"
  run "$end" "$@" >"$log.unfinished.txt" 2>&1 || status=$?
  if [ "$status" = 0 ]; then
    mv "$log.unfinished.txt" "$log.txt"
    return
  fi
  failed=1
  if [ "$status" = 124 ]; then
    echo "$name: cut after $end s: $log.unfinished.txt"
  else
    echo "$name: failed: $log.unfinished.txt"
  fi
  tail -n 12 "$log.unfinished.txt" | sed 's/^/    /'
}
run() {  # SECONDS COMMAND...: for so long at most (0: without end); 124 if it was late
  local status=0 late=$scratch/late job
  rm -f "$late"
  echo "$place"
  echo "${*:2}"
  set -m  # a process group for each job, which gets signals as a whole
  "${@:2}" & child=$! job=$!
  if [ "$1" -gt 0 ]; then
    { sleep "$1"; touch "$late"; stop "$child"; } & watch=$!
    disown "$watch"  # so that bash does not tell of its end
  fi
  set +m
  wait "$child" || status=$?
  child=
  kill -KILL -- "-$job" 2>/dev/null || true  # a worker that it has left, with its memory
  [ -z "$watch" ] || kill -KILL -- "-$watch" 2>/dev/null || true
  watch=
  [ ! -f "$late" ] || return 124
  return "$status"
}
stop() {  # JOB: end it as Ctrl-C does; after 15 seconds by force
  local second
  kill -INT -- "-$1" 2>/dev/null || return 0
  for second in {1..15}; do
    sleep 1
    kill -0 -- "-$1" 2>/dev/null || return 0
  done
  kill -KILL -- "-$1" 2>/dev/null || true
}

# --------------------------------------------------------------------------- a quarter of an hour

quarter() {
  # as many arms as fit, at 9 GB each, on a GPU of 80 GB
  local batches=(--batch_size=16 --gradient_accumulation_steps=4 --controls=False)
  local arms=(rms coupled "coupled coupled_impl=fold" layer "rms residual=autocast") words=()
  if [ -f "$nanogpt/model.py" ]; then
    arms+=(nanogpt)
    words=("--nanogpt=$nanogpt")
  fi
  local train=("$PYTHON" -m bench.train config/rms.py "${batches[@]}" "${words[@]}")
  local decode=("$PYTHON" bench_decode.py random:qwen3-0.6b --peers=false)
  local list
  list=$(printf '%s; ' "${arms[@]}")
  limit=40 stage quarter-tests "${pytest[@]}" -x tests/kernels/test_binding.py -k rms
  limit=150 stage quarter-compile compile
  limit=150 stage quarter-train "${train[@]}" "--arms=$list" --rounds=16 "--out=$out/quarter/train"
  limit=100 stage quarter-decode "${decode[@]}" --arms=A,B,C,D --rounds=12 \
    "--out=$out/quarter/decode"
  limit=100 stage quarter-kernels "$PYTHON" -m bench.kernels --arms=triton --rounds=12 \
    --ops=rms_norm,layer_norm,taper_norm,norm_add_norm --channels=768,2048,4096 --rows=65536 \
    "--out=$out/quarter/kernels"
  limit=60 stage quarter-bytes "${pytest[@]}" -s tests/bench/test_bytes.py -k "real_step and rms"
  # beside the ledger: the microseconds of a launch
  limit=150 stage quarter-llama "$PYTHON" bench_decode.py random:llama3.2-1b --arms=A,C \
    --peers=false --rounds=8 "--out=$out/quarter/decode"
  limit=150 stage quarter-profile "$PYTHON" -m bench.train config/rms.py --batch_size=60 \
    --gradient_accumulation_steps=2 --arms=rms --controls=False --rounds=4 --profile \
    "--out=$out/quarter/profile"
}
compile() {  # what `quarter` times, side by side into one cache; these figures are thrown away
  local arm commands=()
  for arm in "${arms[@]}"; do
    commands+=("$(printf '%q ' "${train[@]}" "--arms=$arm" --rounds=0)")
  done
  for arm in A,C B,D; do commands+=("$(printf '%q ' "${decode[@]}" "--arms=$arm" --rounds=0)"); done
  printf '%s\0' "${commands[@]}" |
    TORCHINDUCTOR_COMPILE_THREADS=4 xargs -0 -n 1 -P "${#commands[@]}" bash -c
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
  local words=() shape batch whole
  [ ! -f "$nanogpt/model.py" ] || words=("--nanogpt=$nanogpt")
  quarter
  # Where does a step wait for the GPU? And does it pay to cut the model where DDP's buckets end?
  stage sync "$PYTHON" -m bench.train config/rms.py --arms=rms --controls=False --rounds=0 --sync
  if [ "$gpus" -gt 1 ]; then
    for whole in True False; do
      stage "ddp-$whole" "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node=1 \
        -m bench.train config/rms.py --batch_size=60 --gradient_accumulation_steps=2 \
        "--arms=rms; rms residual=autocast" --controls=False --rounds=20 \
        "--optimize_ddp=$whole" "--out=$out/ddp-$whole"
    done
  fi
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
cache=$(realpath "$scratch")
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
# what a bench keeps of an interrupted measurement is not the stage
trap '[ -z "$watch" ] || kill -KILL -- "-$watch"; [ -z "$child" ] || stop "$child"; exit 130' INT TERM
every_stage
exit $failed
