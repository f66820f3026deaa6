#!/usr/bin/env bash
# Train with several processes that share this machine's one GPU and talk through NCCL over the loopback interface: to
# see what a cluster would run. Times are no cluster's, because the processes take turns on the GPU.
#
#     bash scripts/one_gpu.sh PROCESSES FLAGS...    of pretrain_gpt.py; the output of the last process is shown
#     PYTHON    (.venv/bin/python)
set -euo pipefail

cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
if [[ ! ${1:-} =~ ^[1-9][0-9]*$ ]]; then
    printf 'one_gpu: error: %s: the first argument is the number of processes\n' "${1:-nothing}" >&2
    exit 2
fi
count=$1
shift
export MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-$((20000 + $$ % 20000))} WORLD_SIZE=$count
export LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1
logs=$(mktemp -d)
processes=()
trap '((${#processes[@]} == 0)) || kill "${processes[@]}" 2>/dev/null || true' EXIT
for ((rank = 0; rank < count; rank++)); do
    # NCCL refuses a second process on a GPU, unless it takes each for another host.
    RANK=$rank NCCL_HOSTID=host$rank "${PYTHON:-.venv/bin/python}" pretrain_gpt.py "$@" &>"$logs/$rank" &
    processes+=($!)
done
tail --pid "${processes[-1]}" --follow=name --retry --lines +1 "$logs/$((count - 1))" 2>/dev/null &
status=0
for rank in "${!processes[@]}"; do
    ended=0
    wait "${processes[rank]}" || ended=$?
    ((ended == 0)) || printf 'one_gpu: process %d ended with status %d, log in %s\n' "$rank" "$ended" "$logs/$rank" >&2
    ((status)) || status=$ended
done
processes=()
wait
exit "$status"
