#!/usr/bin/env bash
# Train every norm type with every seed: ./sweep.sh --help, or the head of study/sweep.py, says how.
set -euo pipefail
[ $# != 0 ] || set -- --help
# Config files may be those of the folder from which this is called.
words=()
for word in "$@"; do
  [[ ! -f $word || $word == /* ]] || word=$PWD/$word
  words+=("$word")
done
cd "$(dirname "$0")"
export PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
exec "$PYTHON" -m study.sweep "${words[@]}"
