#!/usr/bin/env bash
# Table 3 of "Enjoy Your Layer Normalization" with our counts, and the same for many more
# architectures. Writes results/fold/. A few minutes on two CPU cores; needs transformers. Models
# that results/ holds are not measured again.
#
#   repro/cbwc_table3.sh [--key=value ...]
set -euo pipefail
. "$(dirname "$0")/start.sh"
"$PYTHON" -m repro.fold_table --study=table3 --out=results/fold "$@"
