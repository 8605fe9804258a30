#!/usr/bin/env bash
# The chapter's comparison of LayerNorm and RMSNorm on Tiny Shakespeare, 2,000 steps, in its own initialisation
# (unit-normal embeddings) and in GPT-2's. Writes results/cpu/mygpt/. About five minutes on two CPU cores.
#
#   repro/mygpt.sh [--key=value ...]        needs data/shakespeare_char (python data/shakespeare_char/prepare.py)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0; fi
for init in torch gpt2; do
  for norm in layer rms; do
    "$PYTHON" train.py config/mygpt.py --init=$init --norm_type=$norm --out_dir=out/mygpt/$init-$norm "$@"
  done
done
"$PYTHON" repro/mygpt_table.py out/mygpt results/cpu/mygpt
