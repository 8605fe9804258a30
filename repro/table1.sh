#!/usr/bin/env bash
# CoupledNorm's Table 1 (Loretz & Hochreiter 2026, section 5.2), with all five norm types and seeds
# 8 to 15, and the same at smaller sizes.
#
#   repro/table1.sh full    GPT-2 124M on 10 B tokens of FineWeb-Edu, on a node of 8 GPUs. The
#                           paper's 443 k tokens/s are 6.3 hours a run if they are the node's, 0.8
#                           hours if they are each GPU's (it does not say; llm.c reaches 468 k on an
#                           H100): 40 runs take 1.3 to 10.5 days, the paper's own two arms
#                           (ARMS="rms coupled") 0.5 to 4.2 days. An estimate, not measured here.
#   repro/table1.sh cpu     0.84 M parameters, byte level, 2 M tokens of the embedded data set,
#                           HellaSwag on 1,000 items: 40 runs of 3 to 4 minutes on a free CPU core;
#                           4 to 7 minutes were measured with two runs at once and other work
#
#   repro/table1.sh small   30 M parameters of GPT-2's shape, one pass over the 24 M tokens of
#                           --data_dir=data/offline (any texts; repro/gpu.sh says how), 5 norm
#                           types x 6 seeds: 20 minutes of one H200 (estimate)
#   repro/table1.sh pair    GPT-2 124M, rms and coupled, one seed, four times those tokens: loss
#                           curves, no verdict; 10 minutes of one H200 (estimate)
#
# Further arguments go to train.py. Runs that results/ holds already are not run again; with another
# KEEP=FILE.tar.xz they are. Other settings (ARMS, SEEDS, NPROC, HELLASWAG) are sweep.sh's.
set -euo pipefail
. "$(dirname "$0")/start.sh"
scale=${1:-} status=0
[ $# = 0 ] || shift
case $scale in
  full)
    KEEP=${KEEP:-results/$(gpu_name)/table1/runs.tar.xz}
    export KEEP NPROC=${NPROC:-8} OUT=${OUT:-out/table1} HELLASWAG=${HELLASWAG:-auto}
    ./sweep.sh config/layer.py --delta_val_loss=0.001 --delta_train_loss=0.001 \
      --delta_hellaswag_acc=0.005 --delta_hellaswag_acc_norm=0.005 --delta_tok_per_s=0.005 "$@" \
      || status=$?
    ;;
  cpu)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OUT=${OUT:-out/table1_cpu} \
      KEEP=${KEEP:-results/cpu/table1/runs.tar.xz} HELLASWAG=${HELLASWAG:-auto}
    [ -f data/stdlib/meta.json ] || "$PYTHON" data/stdlib/prepare.py
    ./sweep.sh config/table1_cpu.py "$@" || status=$?
    ;;
  small)
    export SEEDS=${SEEDS:-8 9 10 11 12 13}
    KEEP=${KEEP:-results/$(gpu_name)/table1_small/runs.tar.xz}
    export KEEP OUT=${OUT:-out/table1_small}
    ./sweep.sh config/small.py --gradient_accumulation_steps=2 --max_iters=730 --warmup_iters=70 \
      --eval_interval=73 --eval_tokens=851968 --delta_val_loss=0.01 "$@" || status=$?
    ;;
  pair)
    export ARMS=${ARMS:-rms coupled} SEEDS=${SEEDS:-8}
    KEEP=${KEEP:-results/$(gpu_name)/pair_124m/runs.tar.xz}
    export KEEP OUT=${OUT:-out/pair_124m}
    ./sweep.sh config/layer.py --batch_size=48 --gradient_accumulation_steps=2 --max_iters=1000 \
      --warmup_iters=100 --eval_interval=50 --eval_tokens=851968 --delta_val_loss=0.01 "$@" \
      || status=$?
    ;;
  *)
    [ -z "$scale" ] || { echo "error: unknown scale $scale: full, cpu, small or pair" >&2; exit 2; }
    usage
    exit 2
    ;;
esac
[ -f "$KEEP" ] || exit $status  # stopped before any run had ended
"$PYTHON" report.py "$KEEP" --baseline=rms --out="$(dirname "$KEEP")"
[[ " ${ARMS:-layer} " != *" layer "* ]] || "$PYTHON" report.py "$KEEP" --baseline=layer --pictures=False \
  --out="$(dirname "$KEEP")/against_layer"
exit $status
