#!/usr/bin/env bash
# Train a small GPT three times on the same tokens, on four CPU processes (TP1 PP2 DP2): dense, with the preset of the
# paper, and with EDGC's default preset. Then compare.
#
#     bash scripts/quickstart.sh            ends with runs/quickstart/{report.html,report.png,summary.json}
#     bash scripts/quickstart.sh --quick    a sixth of the iterations, in runs/quickstart/quick
#
# A run that was interrupted goes on from its last checkpoint, and one that has finished is kept, while settings and code
# are the same.
set -euo pipefail

case "$*" in
    -h | --help) exec sed -n '2,/^set/ { s/^# \{0,1\}//p }' -- "${BASH_SOURCE[0]}" ;;
esac
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
case "$*" in
    '') run=runs/quickstart shorter=() ;;
    --quick)
        run=runs/quickstart/quick
        shorter=(--train-iters 40 --lr-warmup-iters 10 --edgc-window 5 --save-interval 20 --eval-iters 5)
        ;;
    *) printf 'quickstart: error: %s: only --quick and --help are known\n' "$*" >&2 && exit 2 ;;
esac
bash scripts/setup_env.sh
mkdir -p -- "$run"
exec 9>"$run/lock" # held by the trainings, too
flock --nonblock 9 || { printf 'quickstart: error: %s: another start is under way there\n' "$run" >&2 && exit 2; }
python=.venv/bin/python
data=runs/data/stdlib
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES='' PYTHONWARNINGS=ignore
# Tensors stay in the heap: by default glibc maps each large one anew, and steps are longer.
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456

# The corpus is the interpreter's own standard library: always there, no download.
"$python" tools/preprocess_data.py --python-stdlib --train-sentencepiece 512 --validation-fraction 0.05 \
    --output-prefix "$data"
corpus=$(sha256sum "${data}_meta.json")

# of the log: warnings, progress, what entropy and the budget decide, the sums at the end
shown='^edgc(:| \| (engine|gradients:|total|[0-9/]+ (iterations|.*nats)))'
mapfile -t model < <(grep -v '^#' configs/quickstart.args)
# what a preset stands for, and what a checkpoint holds, changes with the code
code=$(find edgc megatron/edgc pretrain_gpt.py -name '*.py' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum)

train() {
    local name=$1 folder=$run/$1
    shift
    # shellcheck disable=SC2206  # a line of the file holds a flag and its value
    local command=(-m torch.distributed.run --standalone --nproc-per-node 4 pretrain_gpt.py ${model[*]}
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$data.model"
        --train-data-path "${data}_train_text_document" --valid-data-path "${data}_valid_text_document"
        --data-cache-path runs/data/cache --tensorboard-dir "$folder/tensorboard"
        --save "$folder/checkpoints" --load "$folder/checkpoints"
        --edgc-cpu --edgc --edgc-log-dir "$folder" "${shorter[@]}" "$@")
    local identity="${command[*]} # code ${code%% *}, data ${corpus%% *}"
    if [[ -f $folder/finished && $(<"$folder/finished") == "$identity" ]]; then
        printf 'quickstart: %s has finished before, kept\n' "$name"
        return
    fi
    if [[ -f $folder/begun && $(<"$folder/begun") == "$identity" ]]; then
        printf 'quickstart: %s goes on from its last checkpoint, full log in %s\n' "$name" "$folder/log.txt"
    else
        rm -rf -- "$folder"
        mkdir -p -- "$folder"
        printf '%s\n' "$identity" >"$folder/begun"
        printf 'quickstart: training %s, full log in %s\n' "$name" "$folder/log.txt"
    fi
    touch -- "$folder/log.txt"
    "$python" "${command[@]}" &>>"$folder/log.txt" &
    local training=$!
    tail -n 0 -F --pid "$training" "$folder/log.txt" 2>/dev/null | grep --line-buffered -E "$shown" &
    local shows=$! status=0
    trap 'kill -TERM "$training"; wait; exit 143' INT TERM HUP # else the training would go on alone
    wait "$training" || status=$?
    wait "$shows" || true
    trap - INT TERM HUP
    if ((status)); then
        tail -n 30 -- "$folder/log.txt" >&2
        printf 'quickstart: %s failed; the lines above end its log, %s\n' "$name" "$folder/log.txt" >&2
        exit 1
    fi
    mv -- "$folder/begun" "$folder/finished"
    rm -rf -- "$folder/checkpoints"
}

train dense --edgc-engine dense
# Loopback is no network, so the ranks are planned for a link of 0.05 Gbit/s instead of the measured one.
train paper --edgc-preset paper --edgc-link-gbps 0.05
train edgc --edgc-link-gbps 0.05
"$python" tools/report.py "$run"
