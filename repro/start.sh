# The scripts in this folder source it first. With --help it prints their head and ends; else it
# goes to the repository's root and sets PYTHON.
#
# AGAIN=1 trains anew what results/ has already, into out/again, and says at the end which losses
# are equal to the bit.
script=$(realpath "$0")
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$script"; }
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then usage; exit 0; fi
cd "$(dirname "$script")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if [ -n "${AGAIN:-}" ]; then
  again=$PWD/out/again/$(basename "$script" .sh)
  export RESULTS=${RESULTS:-$again} OUT=${OUT:-$again/runs}
  grep -q 'RESULTS:-' "$script" || export KEEP=${KEEP:-$again/runs.tar.xz}
  mkdir -p "$RESULTS"
  trap 'cd "$(dirname "$script")/.." && "$PYTHON" -m repro.again "$RESULTS"' EXIT
elif [ -n "${KEEP:-}" ] && grep -q 'RESULTS:-' "$script" && ! grep -q 'KEEP:-' "$script"; then
  echo "error: KEEP=$KEEP: this study keeps several archives: give RESULTS=FOLDER" >&2
  exit 2
fi
gpu_name() {  # as in results/h100
  "$PYTHON" -c 'import re, sys, torch
if not torch.cuda.is_available():
    sys.exit("error: there is no GPU here")
name = torch.cuda.get_device_name().lower()
print(re.search(r"[a-z]*\d+[a-z]*|$", name).group() or "gpu")'
}
