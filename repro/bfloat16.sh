#!/usr/bin/env bash
# Does bfloat16 on a CPU train as float32 does? The demo's first 300 steps, four norm types, four
# seeds, in both types, one core a run. Then the speed of steps by width, and beside upstream
# nanoGPT. Writes results/cpu/bfloat16/. About half an hour on two CPU cores with AMX.
#
#   repro/bfloat16.sh ../nanoGPT     a clone of karpathy/nanoGPT
set -euo pipefail
. "$(dirname "$0")/start.sh"
[ $# = 1 ] || { echo "error: name the folder of a clone of karpathy/nanoGPT" >&2; exit 2; }
out=out/bfloat16
results=results/cpu/bfloat16

for dtype in float32 bfloat16; do
  ARMS="rms layer coupled taper" SEEDS="1 2 3 4" JOBS=2 HELLASWAG=off OUT=$out/$dtype \
    KEEP=$results/$dtype.tar.xz ./sweep.sh config/demo.py --max_iters=300 --eval_interval=100 \
    --eval_tokens=348160 --sample_tokens=0 --dtype=$dtype --compile=False --init_std=0.08
done

bench() { # $1 name, further arguments of bench.train
  local name=$1
  shift
  "$PYTHON" -m bench.train "$@" --device=cpu --controls=False --out="$out/$name"
  cp "$out/$name/steps.jsonl" "$results/$name.jsonl"
}

f32="dtype=float32 compile"
b16="dtype=bfloat16 compile"
four="rms $f32=False; rms $f32=True; rms $b16=False; rms $b16=True"
for width in 64 128 256 384 768 1024; do
  heads=$((width > 256 ? width / 64 : 4))
  OMP_NUM_THREADS=1 bench width-$width --n_layer=2 --n_embd=$width --n_head=$heads \
    --block_size=128 --batch_size=16 --gradient_accumulation_steps=1 --vocab_size=320 \
    --arms="$four" --rounds=$((width > 384 ? 8 : 20))
done
# the same without AMX: Intel's AVX512-BF16 alone
for width in 128 384; do
  OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 bench no-amx-$width --n_layer=2 \
    --n_embd=$width --n_head=$((width > 256 ? width / 64 : 4)) --block_size=128 --batch_size=16 \
    --gradient_accumulation_steps=1 --vocab_size=320 --arms="${four%;*}" --rounds=10
done
OMP_NUM_THREADS=1 bench table1_cpu config/table1_cpu.py --vocab_size=320 --rounds=30 \
  --arms="$four; coupled $f32=False; coupled $b16=False; coupled $b16=True"

arms="layer; nanogpt; layer $f32=False; layer $f32=True; nanogpt compile=True; layer $b16=False"
arms+="; layer $b16=True; nanogpt $b16=False; nanogpt $b16=True"
small="--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000"
bench nanogpt-small config/shakespeare_char.py --dropout=0 --vocab_size=65 $small --compile=auto \
  --nanogpt="$1" --arms="$arms" --rounds=60 --steps=2
bench nanogpt-10m config/shakespeare_char.py --dropout=0 --vocab_size=65 --batch_size=12 \
  --compile=auto --nanogpt="$1" --arms="$arms" --rounds=12

"$PYTHON" -m repro.bfloat16_table $results
