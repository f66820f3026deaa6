# shellcheck shell=bash
# The body of scripts/pretrain_*.sh, which set MODEL (a file of configs/models/) and METHOD (a line of
# configs/methods.yaml) and source it. Their arguments go to pretrain_gpt.py. Three ways to start one of them:
#
#     sbatch scripts/pretrain_....sh        in Slurm; goes back into the queue when preempted or out of time
#     bash scripts/pretrain_....sh          inside a Slurm allocation (salloc)
#     bash scripts/pretrain_....sh          on one machine without Slurm, through torchrun
#
# In Slurm there is one task for each GPU, or one for each node, which then starts torchrun.
#
#     DATA=PREFIX      data set, the --output-prefix of tools/preprocess_data.py
#     MODEL, CLUSTER   other files of configs/models/ and configs/clusters/; MODEL=tiny tries everything on a laptop
#     RUN=FOLDER       (runs/ and the name of MODEL) where the run gets a folder with the method's name
#     SEED=1234
#     PYTHON           (.venv/bin/python)
#     CONTAINER_IMAGE  run inside this image (Pyxis); CONTAINER_MOUNTS (this repository) and PYTHON (python) with it
#     DRY_RUN=1        print the command, to be pasted, and start nothing; needs Python 3.9 alone, and no DATA
#     PREFLIGHT_ONLY=1 check the nodes (tools/preflight.py) and end; needs no DATA
#
# Before training each node is checked. What is missing is said in one line each; then nothing starts.
# The same command resumes from the newest checkpoint that is whole. A batch job that ends early, by a signal or an error,
# goes back into the queue by itself if it has saved anything since it started and nobody has cancelled it.
set -euo pipefail

case " $* " in
    *' -h '* | *' --help '*) sed -n '2,/^set/ { s/^# \{0,1\}//p }' -- "${BASH_SOURCE[0]}" && exit ;;
esac
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
began=$PWD
cd -- "$root"
as_begun() { # a path as the user meant it, where the script began
    if [[ $1 == /* || $began == "$root" ]]; then printf '%s' "$1"; else printf '%s/%s' "$began" "$1"; fi
}
name=${MODEL##*/}
if [[ -n ${RUN:-} ]]; then RUN=$(as_begun "$RUN"); else RUN=runs/${name%.yaml}; fi
[[ -n ${DATA:-} ]] && DATA=$(as_begun "$DATA")
[[ $MODEL == *.yaml ]] && MODEL=$(as_begun "$MODEL") # any other is a name in configs/
[[ ${CLUSTER:-} == *.yaml ]] && CLUSTER=$(as_begun "$CLUSTER")
[[ ${PYTHON:-} == */* ]] && PYTHON=$(as_begun "$PYTHON") # any other is a command
container=()
python=${PYTHON:-.venv/bin/python}
die() {
    printf '%s: %s\n' "$METHOD" "$*" >&2
    exit 1
}
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    [[ -n ${SLURM_JOB_ID:-}${DRY_RUN:-} ]] || die "CONTAINER_IMAGE needs Slurm, whose srun starts the container"
    for path in "$RUN" "${DATA:-}" "$MODEL" "${CLUSTER:-}"; do
        [[ -n ${CONTAINER_MOUNTS:-} || $path != /* || $path == "$root"/* ]] ||
            die "CONTAINER_IMAGE sees this repository alone: name $path in CONTAINER_MOUNTS, as $root:$root,$path:$path"
    done
    container=(--container-image "$CONTAINER_IMAGE" --container-workdir "$root"
        --container-mounts "${CONTAINER_MOUNTS:-$root:$root}")
    python=${PYTHON:-python}
fi
planner=("$python") # runs what needs no more than Python
if [[ -n ${DRY_RUN:-} || -z ${PYTHON:-}${CONTAINER_IMAGE:-} ]]; then # nothing is installed, or not yet
    for candidate in "$python" .venv/bin/python python3 python ''; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 9))' &>/dev/null && break
    done
    [[ -n $candidate ]] || die "needs Python 3.9 or later: neither python3 nor python is one"
    planner=("$candidate")
elif [[ -n ${CONTAINER_IMAGE:-} ]]; then
    planner=(srun --nodes 1 --ntasks 1 "${container[@]}" "$python")
fi

plan=("${planner[@]}" tools/launch.py --model "$MODEL" --method "$METHOD" --run "$RUN"
    --seed "${SEED:-1234}")
[[ -n ${CLUSTER:-} ]] && plan+=(--cluster "$CLUSTER")
[[ -n ${DATA:-} ]] && plan+=(--data "$DATA")
[[ -n ${DRY_RUN:-}${PREFLIGHT_ONLY:-} ]] && plan+=(--data-placeholder)
per_gpu=
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    plan+=(--nodes "$SLURM_NNODES")
    if ((${SLURM_NTASKS:-0} > SLURM_NNODES)); then
        per_gpu=1
        plan+=(--processes-per-node $((SLURM_NTASKS / SLURM_NNODES)))
    elif [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then
        plan+=(--processes-per-node "$SLURM_GPUS_ON_NODE")
    fi
elif [[ -n ${DRY_RUN:-} ]]; then
    per_gpu=1
fi
settings=$("${plan[@]}" "$@") || exit
eval "$settings"
# shellcheck disable=SC2154  # folder, arguments, nodes, processes_per_node, iterations and notes come from there
[[ -n ${SLURM_JOB_ID:-}${DRY_RUN:-} ]] || ((nodes == 1)) ||
    die "$nodes nodes and no Slurm: submit with sbatch, or set CLUSTER to a file of one node"

# a step inside a step waits for what the outer one holds; those of salloc and sbatch have numbers close to 2^32
[[ -n ${DRY_RUN:-} ]] || ((${SLURM_STEP_ID:-4294967295} > 4294967200)) ||
    die "started inside srun: start it in salloc, or submit it with sbatch"
if [[ -z ${DRY_RUN:-} ]]; then
    [[ -n ${PYTHON:-}${CONTAINER_IMAGE:-} ]] || bash scripts/setup_env.sh
    on_each_node=()
    [[ -n ${SLURM_JOB_ID:-} ]] && on_each_node=(srun --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 "${container[@]}")
    facts=$("${on_each_node[@]}" "$python" tools/preflight.py --facts "${arguments[@]}") || true # who is missing comes below
    added=$("${planner[@]}" tools/preflight.py --nodes "$nodes" --processes-per-node "$processes_per_node" \
        "${arguments[@]}" <<<"$facts") || exit
    [[ -n ${PREFLIGHT_ONLY:-} ]] && exit
    # shellcheck disable=SC2086  # flags, without values
    settings=$("${plan[@]}" --record "$@" $added) || exit
    eval "$settings"
fi

environment="export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
if [[ -z ${SLURM_JOB_ID:-} ]] && ((nodes == 1)); then
    command=("$python" -m torch.distributed.run --standalone --nproc-per-node "$processes_per_node"
        pretrain_gpt.py "${arguments[@]}")
else
    # shellcheck disable=SC2016  # DRY_RUN prints it as it is
    environment+='
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT'
    command=(srun --kill-on-bad-exit=1 "${container[@]}")
    if [[ -n $per_gpu ]]; then
        # shellcheck disable=SC2016  # each task puts in its own
        command+=(bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec "$@"' task
            "$python" pretrain_gpt.py "${arguments[@]}")
    else
        eval "$environment"
        command+=(--ntasks-per-node 1 "$python" -m torch.distributed.run --nnodes "$SLURM_NNODES"
            --nproc-per-node "$processes_per_node" --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d
            --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" pretrain_gpt.py "${arguments[@]}")
    fi
fi
if [[ -n ${DRY_RUN:-} ]]; then
    printf '# %s\n' "nothing is started; the lines from here on can be pasted into bash" "${notes[@]}" \
        "the script itself checks each node first and turns off kernels of apex that are missing: PREFLIGHT_ONLY=1"
    ((nodes == 1)) || printf '# in an allocation, as by: salloc --nodes %s --ntasks-per-node %s --gpus-per-node %s\n' \
        "$nodes" "$processes_per_node" "$processes_per_node"
    [[ -n ${CONTAINER_IMAGE:-} ]] || command -v -- "$python" >/dev/null ||
        printf '# there is no %s yet: bash scripts/setup_env.sh makes .venv\n' "$python"
    printf 'cd %q\n%s\n' "$root" "$environment"
    exec "${planner[@]}" -c 'import shlex, sys; print(shlex.join(sys.argv[1:]))' "${command[@]}"
fi

eval "$environment"
printf '%s\n' "${notes[@]/#/$METHOD: }"
saved() { cat -- "$folder/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }
before=$(saved)
((before == 0)) || printf '%s: resuming from iteration %s of %s\n' "$METHOD" "$before" "$iterations"
exec {log}> >(trap '' INT TERM HUP && exec tee -a -- "$folder/log.txt") # which outlives a signal to all of them
tee=$!
training='' stopped=''
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    trap : TERM USR1 USR2 # Slurm signals the tasks, which save and end; this shell has to outlive them
    trap 'stopped=1; [[ -z $training ]] || kill -TERM "$training"' INT HUP # srun passes TERM on to the tasks
else
    # a background job of bash ignores Ctrl-C until torchrun has begun to handle it
    trap 'stopped=1; [[ -z $training ]] || kill -TERM "$training"' INT TERM HUP
fi
"${command[@]}" >&"$log" 2>&1 &
training=$!
exec {log}>&-
[[ -z $stopped ]] || kill -TERM "$training" # the signal came before the training had a number
until # a signal ends a wait, but not the training
    status=0
    wait "$training" || status=$?
    ! kill -0 "$training" 2>/dev/null
do :; done
wait "$tee" || true
after=$(saved)
if ((status == 0 && after >= iterations)); then
    printf '%s: finished %s iterations, results in %s\n' "$METHOD" "$iterations" "$folder"
    exit
fi
printf '%s: ended with status %s, saved up to iteration %s of %s, log in %s\n' "$METHOD" "$status" "$after" "$iterations" \
    "$folder/log.txt" >&2
# Only a batch job that has made progress: any other would fail for ever.
if [[ $0 == */slurm_script ]] && ((after > before)); then
    # one that was cancelled is no longer running, but completing
    [[ $(scontrol --oneliner show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]] && exec scontrol requeue "$SLURM_JOB_ID"
fi
exit $((status > 0 ? status : 1))
