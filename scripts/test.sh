#!/usr/bin/env bash
# Run the tests:  bash scripts/test.sh [--slow] [pytest arguments]      (paths are relative to the repository root)
# --slow adds the longest tests.
# GPUs stay visible: the tests that need one run where there is one and are skipped, with the reason, elsewhere.
set -euo pipefail

cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
bash scripts/setup_env.sh
# One thread a process: the distributed tests start several, and 2 cores are enough for those. Two files of tests run at
# a time: most of a distributed test is the start of its processes, which leaves cores idle.
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest --numprocesses 2 --dist loadfile "$@"
