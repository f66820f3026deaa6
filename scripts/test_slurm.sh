#!/usr/bin/env bash
# Start a private Slurm on this machine, submit a paper's script with the tiny model, kill it once and signal it once in
# mid-run, and compare what it trains with an uninterrupted run: the same bits.
#
#     bash scripts/test_slurm.sh          needs root and Debian's slurm-wlm; else it says why it is skipped
#
# Status 0: passed; 77: skipped. Everything it starts is stopped and removed.
set -euo pipefail

(($# == 0)) || { printf 'test_slurm: error: %s: takes no arguments\n' "$*" >&2 && exit 2; }
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
skip() {
    printf 'test_slurm: skipped: %s\n' "$*"
    exit 77
}
say() { printf 'test_slurm: %s\n' "$*"; }
die() {
    say "failed: $*" >&2
    for log in "$work"/*.out "$work"/slurmctld.log "$work"/slurmd.log; do
        [[ -f $log ]] && tail -n 15 -- "$log" >&2
    done
    exit 1
}
((EUID == 0)) || skip "Slurm's daemons have to be started as root"
for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || skip "there is no $program: apt-get install slurm-wlm"
done
bash scripts/setup_env.sh

work=$(mktemp -d /tmp/edgc-slurm-XXXXXX)
# munge wants folders that others cannot write, and that it can reach
chmod 755 "$work"
finish() {
    set +e
    [[ -n ${job:-} ]] && scancel --quiet "$job" 2>/dev/null
    for name in slurmd slurmctld munged; do
        [[ -f $work/$name.pid ]] && kill "$(<"$work/$name.pid")" 2>/dev/null
    done
    sleep 1
    rm -rf -- "$work"
}
trap finish EXIT

host=$(hostname -s)
port=$((20000 + RANDOM % 20000))
export SLURM_CONF=$work/slurm.conf
cat >"$SLURM_CONF" <<EOF
ClusterName=edgc
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# a job that goes back into the queue waits until its credential has expired
AuthInfo=socket=$work/munge.socket,cred_expire=5
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 RealMemory=2000 Gres=gpu:4 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES State=UP
EOF
# The scripts ask for GPUs, so the node has some: files that nothing opens.
touch "$work"/gpu{0..3}
printf 'Name=gpu File=%s/gpu[0-3]\n' "$work" >"$work/gres.conf"
mkdir "$work/state" "$work/spool"
head -c 1024 /dev/urandom >"$work/munge.key"
chmod 400 "$work/munge.key"
munged --force --key-file="$work/munge.key" --socket="$work/munge.socket" --pid-file="$work/munged.pid" \
    --log-file="$work/munged.log" --seed-file="$work/munged.seed" --num-threads=2
slurmctld
slurmd -N "$host"
for _ in {1..60}; do
    [[ $(sinfo --noheader --format=%T 2>/dev/null) == idle ]] && break
    sleep 1
done
[[ $(sinfo --noheader --format=%T) == idle ]] || die "the node does not become idle"
say "$(sinfo --version) runs"

.venv/bin/python tools/preprocess_data.py --input edgc --glob '*.py' --train-sentencepiece 512 \
    --validation-fraction 0.2 --output-prefix "$work/data/edgc" >"$work/data.log"
iterations=14
# Saved after every step, so that a signal adds no save that the other run does not have: saving divides errors anew.
export MODEL=tiny DATA=$work/data/edgc
flags=(--train-iters "$iterations" --lr-warmup-iters 2 --save-interval 1 --edgc-window 5 --eval-iters 1)
submit() { # tasks, folder
    RUN=$work/$2 sbatch --parsable --nodes=1 --ntasks-per-node="$1" --gpus-per-node=4 --time=20 \
        --output="$work/$2.out" scripts/pretrain_gpt2_12b_edgc.sh "${flags[@]}"
}
state() { scontrol --oneliner show job "$1" | sed -n 's/.* JobState=\([A-Z_]*\) .*/\1/p'; }
saved() { cat -- "$work/$1/edgc/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }
until_saved() { # folder, iteration
    for _ in {1..300}; do
        (($(saved "$1") >= $2)) && return
        [[ $(state "$job") =~ FAILED|CANCELLED|TIMEOUT|COMPLETED ]] && die "the job ended: $(state "$job")"
        sleep 1
    done
    die "iteration $2 of $1 was not saved in 5 minutes"
}
until_done() {
    for _ in {1..300}; do
        case $(state "$job") in
            COMPLETED) return ;;
            FAILED | CANCELLED | TIMEOUT | NODE_FAIL) die "job $job: $(state "$job")" ;;
        esac
        sleep 1
    done
    die "job $job has not ended in 5 minutes"
}

job=$(submit 4 interrupted)
until_saved interrupted 3
say "killing the tasks after iteration $(saved interrupted)"
scancel --signal=KILL "$job.1" # the step that trains, after the one that checks; a killed job counts as cancelled
until_saved interrupted 7
say "signalling the tasks after iteration $(saved interrupted)"
scancel --signal=TERM "$job"
until_done
restarts=$(scontrol --oneliner show job "$job" | sed -n 's/.* Restarts=\([0-9]*\) .*/\1/p')
((restarts == 2)) || die "expected 2 restarts, Slurm counts $restarts"
grep -q '^preflight: nothing is missing on ' "$work/interrupted.out" || die "the nodes were not checked before training"
say "finished after $restarts restarts; now uninterrupted, torchrun in one task"
job=$(submit 1 whole)
until_done
# The tiny model retains every hundredth iteration.
[[ $(cd -- "$work/whole/edgc/checkpoints" && echo iter_*) == iter_00000$iterations ]] ||
    die "more than the newest checkpoint is left: $(cd -- "$work/whole/edgc/checkpoints" && echo iter_*)"
job=$(submit 4 cancelled)
until_saved cancelled 2
scancel "$job"
until [[ -z $(squeue --noheader --jobs "$job" 2>/dev/null) ]]; do sleep 1; done
[[ $(state "$job") == CANCELLED ]] || die "a job that was cancelled is $(state "$job")"
say "a job that was cancelled stays so"
job=
.venv/bin/python - "$work"/{interrupted,whole}/edgc/checkpoints <<'PYTHON' || die "the runs differ"
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def tensors(folder: str) -> dict[str, torch.Tensor]:
    iteration = int(Path(folder, "latest_checkpointed_iteration.txt").read_text())
    reader = FileSystemReader(Path(folder, f"iter_{iteration:07}"))
    known = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)
        for name, meta in known.items()
        if isinstance(meta, TensorStorageMetadata)
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


first, second = map(tensors, sys.argv[1:])
if first.keys() != second.keys() or not first:
    sys.exit("other tensors are saved")
different = [name for name in first if not torch.equal(first[name], second[name])]
if different:
    sys.exit(f"{len(different)} of {len(first)} tensors differ, one is {different[0]}")
print(f"test_slurm: {len(first)} tensors of parameters and optimizer have the same bits")
PYTHON
say passed
