#!/bin/sh
# Checks and measures the kernels on this machine's GPU: Python >= 3.11, torch and Triton, nothing
# else. `--dry` runs on a CPU; `--help` lists the rest.
root=$(cd "$(dirname "$0")/../.." && pwd)
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
