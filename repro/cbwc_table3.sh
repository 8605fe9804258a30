#!/usr/bin/env bash
# Table 3 of "Enjoy Your Layer Normalization" with our counts, and the same for many more
# architectures. Writes results/fold/. A few minutes on two CPU cores; needs transformers.
#
#   repro/cbwc_table3.sh [--key=value ...]
#
# --rules=paper --models=gpt2,bert prints the paper's counts alone.
set -euo pipefail
. "$(dirname "$0")/start.sh"
"$PYTHON" repro/cbwc_table3.py --out=results/fold "$@"
