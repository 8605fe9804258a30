#!/usr/bin/env bash
# The chapter's comparison of LayerNorm and RMSNorm on Tiny Shakespeare, 2,000 steps, in its own
# initialisation (unit-normal embeddings) and in GPT-2's. Writes results/cpu/mygpt/. About five
# minutes on two CPU cores.
#
#   python data/shakespeare_char/prepare.py      makes data/shakespeare_char, which this needs
#   repro/mygpt.sh [--key=value ...]
set -euo pipefail
. "$(dirname "$0")/start.sh"
for init in torch gpt2; do
  for norm in layer rms; do
    "$PYTHON" train.py config/mygpt.py --init=$init --norm_type=$norm \
      --out_dir=out/mygpt/$init-$norm "$@"
  done
done
"$PYTHON" -m repro.mygpt_table out/mygpt results/cpu/mygpt
