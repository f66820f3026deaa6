#!/usr/bin/env bash
# Train a small GPT twice on the same tokens, dense and with EDGC, on four CPU processes (TP1 PP2 DP2), and compare.
#
#     bash scripts/quickstart.sh          ends with runs/quickstart/{report.html,report.png,summary.json}
#
# A run that has finished with the same settings is kept.
set -euo pipefail

cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
bash scripts/setup_env.sh
python=.venv/bin/python
run=runs/quickstart
data=runs/data/stdlib
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES='' PYTHONWARNINGS=ignore

# The corpus is the interpreter's own standard library: always there, no download.
"$python" tools/preprocess_data.py --python-stdlib --train-sentencepiece 512 --validation-fraction 0.05 \
    --output-prefix "$data"

mapfile -t model < <(grep -v '^#' configs/quickstart.args)

train() {
    local name=$1 folder=$run/$1
    shift
    # shellcheck disable=SC2206  # a line of the file holds a flag and its value
    local command=(-m torch.distributed.run --standalone --nproc-per-node 4 pretrain_gpt.py ${model[*]}
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$data.model"
        --train-data-path "${data}_train_text_document" --valid-data-path "${data}_valid_text_document"
        --data-cache-path runs/data/cache --tensorboard-dir "$folder/tensorboard"
        --edgc-cpu --edgc --edgc-log-dir "$folder" "$@")
    if [[ -f $folder/finished && $(<"$folder/finished") == "${command[*]}" ]]; then
        printf 'quickstart: %s has finished before, kept\n' "$name"
        return
    fi
    rm -rf -- "$folder"
    mkdir -p -- "$folder"
    printf 'quickstart: training %s, full log in %s\n' "$name" "$folder/log.txt"
    "$python" "${command[@]}" &>"$folder/log.txt" &
    local training=$!
    tail -n +1 -F --pid "$training" "$folder/log.txt" 2>/dev/null | grep --line-buffered '^edgc' || true
    if ! wait "$training"; then
        tail -n 30 -- "$folder/log.txt" >&2
        printf 'quickstart: %s failed; the lines above end its log, %s\n' "$name" "$folder/log.txt" >&2
        exit 1
    fi
    printf '%s\n' "${command[*]}" >"$folder/finished"
}

train dense --edgc-engine dense
# Loopback is no network, so the ranks are planned for a link of 0.05 Gbit/s instead of the measured one.
train edgc --edgc-link-gbps 0.05
"$python" tools/report.py "$run"
