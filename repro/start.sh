# Sourced by the scripts beside it, before anything else: --help shows their head; then they are in
# the repository, and its Python is $PYTHON.
script=$(realpath "$0")
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$script"; }
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then usage; exit 0; fi
cd "$(dirname "$script")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
