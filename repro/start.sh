# The scripts in this folder source it first. With --help it prints their head and ends; else it
# goes to the repository's root and sets PYTHON.
script=$(realpath "$0")
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$script"; }
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then usage; exit 0; fi
cd "$(dirname "$script")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
gpu_name() {  # as in results/h100
  "$PYTHON" -c 'import re, sys, torch
if not torch.cuda.is_available():
    sys.exit("error: there is no GPU here")
name = torch.cuda.get_device_name().lower()
print(re.search(r"[a-z]*\d+[a-z]*|$", name).group() or "gpu")'
}
