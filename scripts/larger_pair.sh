#!/usr/bin/env bash
# Train a GPT of 42 million parameters twice on the same 20 million tokens, dense and with EDGC's default preset, on two
# CPU processes. Then evaluate both zero-shot, on texts that neither has seen. Each run takes some hours.
#
#     bash scripts/larger_pair.sh
#
# ends with runs/larger_pair/{report.html,summary.json,zero_shot.md}. What was interrupted goes on from its last
# checkpoint with the same command.
set -euo pipefail

case "$*" in
    '') ;;
    -h | --help) exec sed -n '2,/^set/ { s/^# \{0,1\}//p }' -- "${BASH_SOURCE[0]}" ;;
    *) printf 'larger_pair: error: %s: only --help is known\n' "$*" >&2 && exit 2 ;;
esac
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
bash scripts/prepare_corpora.sh
python=.venv/bin/python
run=runs/larger_pair texts=runs/data/texts
export MODEL=gpt2_42m DATA=runs/data/mixed8192 RUN=$run CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
# Tensors stay in the heap: by default glibc maps each large one anew, and steps are longer.
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456
mkdir -p -- "$run"
exec 9>"$run/lock" # held by the trainings, too
flock --nonblock 9 || { printf 'larger_pair: error: %s: another start is under way there\n' "$run" >&2 && exit 2; }

# English and Go, without folders of each that are kept for the evaluation.
mapfile -t trained < <(find "$texts/english" -name networking -prune -o -name '*.txt' -print | LC_ALL=C sort)
mapfile -t -O "${#trained[@]}" trained < <(find "$texts/go" -name runtime -prune -o -name '*.go' -print | LC_ALL=C sort)
"$python" tools/preprocess_data.py --input "${trained[@]}" --train-sentencepiece 8192 --validation-fraction 0.02 \
    --output-prefix "$DATA"
"$python" tools/make_tasks.py --name english --texts $texts/english/networking --glob '*.txt' --context 400 \
    --output "$run/tasks"
"$python" tools/make_tasks.py --name go --texts $texts/go/runtime --glob '*.go' --context 400 --output "$run/tasks"

bash scripts/pretrain_gpt2_12b_baseline.sh
bash scripts/pretrain_gpt2_12b_edgc.sh
for name in dense edgc; do
    "$python" tools/export_hf.py --load "$run/$name/checkpoints" --output "$run/$name/hf" --overwrite
done
HF_HUB_OFFLINE=1 "$python" tools/evaluate.py dense="$run/dense/hf" edgc="$run/edgc/hf" --include-path "$run/tasks" \
    --tasks english_perplexity,go_perplexity,english_word_order,go_word_order --output "$run"
"$python" tools/report.py "$run"
