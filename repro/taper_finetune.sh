#!/usr/bin/env bash
# The LayerNorms of a model that is already trained, tapered away while it is fine-tuned (Kanavalau,
# Amo Alonso & Lall 2026, section 5), against dropping them at once and against training on with
# them.
#
#   repro/taper_finetune.sh gpt2   GPT-2 124M from the hub on FineWeb-Edu, 0.1 B tokens an arm: on a
#                                  GPU, with data/fineweb_edu. Some five minutes an arm and seed on
#                                  an H200 (estimate). gpt2-medium, gpt2-large and gpt2-xl likewise
#   repro/taper_finetune.sh cpu    our own model of `repro/table1.sh cpu`, trained with LayerNorm
#                                  first: seven minutes of a CPU core a seed
#   repro/taper_finetune.sh cbwc --data_dir=DIR [--dropout=0.1]
#                                  the same models, fine-tuned on another text of bytes: as LayerNorm,
#                                  as cbwc (without dropout the same), and as plain RMSNorm
#                                  ("Enjoy Your Layer Normalization", section 5.4)
#
# Further arguments go to train.py, of cpu and cbwc to the runs that fine-tune; BASE is for those that
# are fine-tuned (BASE="--init_std=0.08"). SEEDS are sweep.sh's; a seed decides the order of the data
# and, on the CPU, the model.
set -euo pipefail
. "$(dirname "$0")/start.sh"
scale=${1:-} status=0
[ $# = 0 ] || shift
taper="taper --taper_base=layer"
abrupt="$taper --taper_warmup=0.3 --taper_end=0.3"
arms="layer '$taper --taper_warmup=0.1 --taper_end=0.5' '$abrupt'" name=taper_finetune
[ "$scale" != cbwc ] || arms="layer cbwc rms" name=cbwc_finetune
export ARMS="${ARMS:-$arms}" SEEDS="${SEEDS:-8 9 10 11}" HELLASWAG=${HELLASWAG:-off}
case $scale in
  gpt2 | gpt2-medium | gpt2-large | gpt2-xl)
    KEEP=${KEEP:-results/$(gpu_name)/taper_finetune/$scale/runs.tar.xz}
    export KEEP OUT=${OUT:-out/taper_finetune/$scale}
    ./sweep.sh config/layer.py --init_from="$scale" --max_iters=200 --learning_rate=6e-5 \
      --min_lr=6e-6 --warmup_iters=20 --eval_interval=20 --delta_val_loss=0.02 "$@" || status=$?
    ;;
  cpu | cbwc)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OUT=${OUT:-out/$name}
    export KEEP=${KEEP:-results/cpu/$name/runs.tar.xz}
    [ -f data/stdlib/meta.json ] || "$PYTHON" data/stdlib/prepare.py
    for seed in $SEEDS; do
      SEEDS=$seed ARMS=layer OUT=$OUT/base KEEP="" ./sweep.sh config/table1_cpu.py ${BASE:-}
      SEEDS=$seed ./sweep.sh config/table1_cpu.py --init_from="$OUT/base/layer-$seed" \
        --max_iters=300 --warmup_iters=20 --learning_rate=1e-3 --min_lr=1e-4 --eval_interval=30 \
        --delta_val_loss=0.0234 "$@" || status=$?
    done
    ;;
  *)
    usage
    exit 2
    ;;
esac
"$PYTHON" report.py "$KEEP" --baseline=layer --out="$(dirname "$KEEP")"
[[ $ARMS != *"$abrupt"* ]] || "$PYTHON" report.py "$KEEP" --baseline="$abrupt" --pictures=False \
  --out="$(dirname "$KEEP")/against_abrupt"
exit $status
