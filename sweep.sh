#!/usr/bin/env bash
# Train every norm type with every seed: ./sweep.sh --help, or the head of study/sweep.py, says how.
set -euo pipefail
[ $# != 0 ] || set -- --help
# The config file may be one of the folder from which this is called.
[[ ! -f $1 || $1 == /* ]] || set -- "$PWD/$1" "${@:2}"
cd "$(dirname "$0")"
export PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
exec "$PYTHON" -m study.sweep "$@"
