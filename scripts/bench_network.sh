#!/usr/bin/env bash
# Time real runs on limited links:
#     bash scripts/bench_network.sh [--quick | --overhead | --stage-ends | --linear | --to-the-end] [--modes ...] [...]
# The flags are those of tools/bench_network.py; --help lists them.
# Needs root and iproute2: each process gets a network namespace whose link is limited.
set -euo pipefail

cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
bash scripts/setup_env.sh
case " $* " in
    *' -h '* | *' --help '* | *' --report '*) exec .venv/bin/python tools/bench_network.py "$@" ;; # no link is needed
esac
if ((EUID != 0)) || ! command -v tc >/dev/null; then
    echo "bench_network.sh: error: limiting links needs root and iproute2" >&2
    exit 2
fi
.venv/bin/python tools/preprocess_data.py --python-stdlib --train-sentencepiece 512 --validation-fraction 0.05 \
    --output-prefix runs/data/network >/dev/null
exec .venv/bin/python tools/bench_network.py "$@"
