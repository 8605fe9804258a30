#!/usr/bin/env bash
# CoupledNorm in a model that is already trained, from the first step to the table, on CPU cores
# (results/cpu/posthoc).
#
#   repro/posthoc.sh FOLDER   FOLDER holds openstax_ccby_train.jsonl.xz and
#                             openstax_ccby_val.jsonl.xz (college textbooks; any other two files of
#                             documents under these names will do)
#
# For each seed, with a teacher of its own:
# 1. a teacher of 10 M parameters, Llama's shape, bytes, 3.1 M tokens of every second document
# 2. distillation from KL alone on 1.0 M tokens of the other documents, two plans (every block
#    coupled, and the suggested one)
# 3. the control: the teacher trained on, on the same text, for as many tokens, with the same
#    settings
#
# Before 2, with the teacher of seed 1 alone: sizes of its residual stream, alpha, which blocks to
# couple, KL against statistics saved.
#
# At the end KL and val loss of all models on all held-out documents, paired by window. The table is
# over all seeds that windows.jsonl.xz holds, also those of earlier calls.
#
#   SEEDS="2 3"    only these seeds, and nothing of what comes before 2
#   RATE=2e-4      the students' learning rate (1e-4, the best of four on distillation's own text, and
#                  not at the end of the grid)
#   JOBS=2         runs side by side, one CPU core each; a teacher, and what judges a seed, take all
#                  of these cores (1)
#   DTYPE=float32  on a CPU that has no units for bfloat16 (bfloat16)
#
# A seed takes one to two hours of a free core. Steps that are done already are skipped.
set -euo pipefail
. "$(dirname "$0")/start.sh"
[ $# -gt 0 ] || { usage; exit 2; }
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
source=$1 seeds=${SEEDS:-1 2 3} rate=${RATE:-1e-4} jobs=${JOBS:-1} dtype=${DTYPE:-bfloat16}
out=${OUT:-out/posthoc} results=${RESULTS:-results/cpu/posthoc}
die() { echo "error: $1" >&2; exit 2; }
for part in train val; do
  [ -f "$source/openstax_ccby_$part.jsonl.xz" ] ||
    die "$source/openstax_ccby_$part.jsonl.xz: no such file: FOLDER needs it"
done
for seed in $seeds; do
  [[ $seed =~ ^[0-9]+$ ]] || die "SEEDS: $seed is no seed: give numbers, separated by blanks"
done
[[ $rate =~ ^[0-9]*\.?[0-9]+(e-?[0-9]+)?$ ]] || die "RATE=$rate: give a learning rate"
[[ $jobs =~ ^[1-9][0-9]*$ ]] || die "JOBS=$jobs: give the number of runs side by side"
[[ $dtype =~ ^(bfloat16|float16|float32)$ ]] || die "DTYPE=$dtype: give bfloat16 or float32"
mkdir -p "$out" "$results"
# Eight documents of the first half are for evaluation while models train. What judges the models
# in the end is not looked at before.
for half in a b; do
  [ -f "$out/text_$half/meta.json" ] && continue
  # b in random order, so that its beginning has documents of all books
  "$PYTHON" -c 'import lzma, random, sys
half, source, target, val = sys.argv[1:]
lines = lzma.open(source, "rt", encoding="utf-8").readlines()[half == "b" :: 2]
random.Random(0).shuffle(lines)
if half == "a":
    open(val, "w", encoding="utf-8").writelines(lines[:8])
    lines = lines[8:]
open(target, "w", encoding="utf-8").writelines(lines)' \
    $half "$source/openstax_ccby_train.jsonl.xz" "$out/$half.jsonl" "$out/val.jsonl"
  "$PYTHON" data/prepare.py "$out/$half.jsonl" --val="$out/val.jsonl" \
    --tokenizer=bytes --out_dir="$out/text_$half" --processes=1
done
finished() {  # run folder; a run that Ctrl-C stops saves, and exits with 0
  tail -n 1 "$1/log.jsonl" | grep -q '"reason": "done"' || { echo "$1: stopped" >&2; exit 130; }
}
train() {  # run folder, keys
  "$PYTHON" train.py "${@:2}" --out_dir="$1"
  finished "$1"
}
teacher() {  # seed
  OMP_NUM_THREADS=$jobs train "$out/teacher-$1" config/posthoc_teacher.py --seed="$1" \
    --data_dir="$out/text_a" --dtype="$dtype"
}
# AdamW's steps are of the learning rate's size however small the KL is, so a low rate ends lower.
settings="--min_lr=0 --weight_decay=0 --warmup_iters=20 --max_iters=500 --eval_interval=250"
distil() {  # teacher's seed, run folder, coupled_first, learning rate, seed, keys
  "$PYTHON" distill.py --teacher="$out/teacher-$1" --local="$out/b.jsonl" --method=full \
    --block_size=256 --batch_size=8 --gradient_accumulation_steps=1 \
    --checkpoint_activations=False --dtype="$dtype" --shuffle=65536 $settings \
    --coupled_first="$3" --learning_rate="$4" --seed="$5" "${@:6}" --out_dir="$2"
  finished "$2"
}
control() {  # seed, learning rate
  train "$out/teacher-longer-$1" config/posthoc_teacher.py --init_from="$out/teacher-$1" \
    --data_dir="$out/text_b" --seed="$1" --dtype="$dtype" $settings --learning_rate="$2" \
    --eval_tokens=16384 --sample_tokens=0
}
export PYTHON out settings dtype
export -f finished train distil control
side_by_side() {  # reads commands, one a line; xargs starts no more of them after a 255
  xargs -d '\n' -P "$jobs" -n 1 bash -euo pipefail -c 'trap "[ \$? = 0 ] || exit 255" EXIT; eval "$0"'
}

if [ -z "${SEEDS:-}" ]; then
  teacher 1
  [ -f "$out/sizes.jsonl" ] ||
    "$PYTHON" -m posthoc.rms_stats "$out/teacher-1" --text="$out/b.jsonl" --windows=32 --across \
      --budget=0.05 --plot="$out/fig3.png" --out="$out/sizes.jsonl"
  cp "$out/sizes.jsonl" "$out/fig3.png" "$results/"
fi
for seed in $seeds; do
  teacher "$seed"
  side_by_side <<END
distil $seed "\$out/student-0-$seed" 0 $rate $seed
distil $seed "\$out/student-1-$seed" 1 $rate $seed
control $seed $rate
END
  "$PYTHON" -m evidence.archive "$results/runs.tar.xz" \
    "$out"/{teacher,student-0,student-1,teacher-longer}-"$seed"
  OMP_NUM_THREADS=$jobs "$PYTHON" -m repro.posthoc_table "$out" "$seed" \
    "$source/openstax_ccby_val.jsonl.xz" "$results"
done
