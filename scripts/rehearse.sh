#!/usr/bin/env bash
# Everything around a paper's run with a tiny model on this machine, in about ten minutes: dry run, data, baseline and EDGC
# through their own scripts, export, zero-shot, report. EDGC runs as the script has it, with the preset of the paper, is
# stopped in mid-run and started again; then once more with the default preset, balanced.
#
#     bash scripts/rehearse.sh
#
# ends with runs/rehearsal/{paper,balanced}/{report.html,summary.json,zero_shot.md}.
set -euo pipefail

case "$*" in
    '') ;;
    -h | --help) exec sed -n '2,/^set/ { s/^# \{0,1\}//p }' -- "${BASH_SOURCE[0]}" ;;
    *) printf 'rehearse: error: %s: only --help is known\n' "$*" >&2 && exit 2 ;;
esac
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
bash scripts/setup_env.sh
python=.venv/bin/python
run=runs/rehearsal
export MODEL=tiny DATA=$run/data/stdlib CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
mkdir -p -- "$run"
exec 9>"$run/lock" # held by the trainings, too
flock --nonblock 9 || { printf 'rehearse: error: %s: another rehearsal is under way\n' "$run" >&2 && exit 2; }
rm -rf -- "${run:?}"/*/ "$run"/*.*
mkdir -p -- "$run/paper" "$run/balanced"
say() { printf 'rehearse: %s\n' "$*"; }

say "the command of the paper's run, for 64 GPUs that are not here"
MODEL=gpt2_12.1b DATA='' DRY_RUN=1 bash scripts/pretrain_gpt2_12b_edgc.sh >"$run/command.txt"
grep '^# ' -- "$run/command.txt"

say "data: the interpreter's standard library"
"$python" tools/preprocess_data.py --python-stdlib --train-sentencepiece 512 --validation-fraction 0.05 \
    --output-prefix "$DATA"

# Loopback is no network, so ranks are planned for a link of 0.05 Gbit/s.
twin=(bash scripts/pretrain_gpt2_12b_edgc.sh --edgc-link-gbps 0.05)
quietly() { # log, command
    "${@:2}" >>"$1" 2>&1 || { tail -n 20 -- "$1" >&2 && exit 1; }
}
say "training, logs in $run/{paper/dense,paper/edgc,balanced/edgc}/log.txt: the baseline"
RUN=$run/paper quietly "$run/dense.out" bash scripts/pretrain_gpt2_12b_baseline.sh
say "as the paper has it, stopped after iteration 50"
RUN=$run/paper "${twin[@]}" >"$run/paper.out" 2>&1 &
script=$!
trap 'kill -TERM "$script"; wait; exit 143' INT TERM HUP # else the training would go on alone
until (($(cat -- "$run/paper/edgc/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0) >= 50)); do
    kill -0 "$script" || { tail -n 20 -- "$run/paper.out" >&2 && exit 1; }
    sleep 0.2
done
kill -TERM "$script"
wait "$script" || true
trap - INT TERM HUP
tail -n 1 -- "$run/paper.out"
RUN=$run/paper quietly "$run/paper.out" "${twin[@]}"
grep -E '^edgc: (checkpoints|resuming|finished)' -- "$run/paper.out" | uniq
say "left of the checkpoints: $(cd -- "$run/paper/edgc/checkpoints" && echo iter_*)"
say "with the default preset"
RUN=$run/balanced quietly "$run/balanced.out" "${twin[@]}" --edgc-preset balanced
ln -s ../paper/dense "$run/balanced/dense"

say "zero-shot: the order of words in modules that were in no corpus"
"$python" tools/make_tasks.py --name code --texts edgc megatron tests tools --glob '*.py' --output "$run/tasks"
for model in paper/dense paper/edgc balanced/edgc; do
    "$python" tools/export_hf.py --load "$run/$model/checkpoints" --output "$run/$model/hf" >/dev/null
done
for preset in paper balanced; do
    say "$preset"
    HF_HUB_OFFLINE=1 "$python" tools/evaluate.py dense="$run/$preset/dense/hf" edgc="$run/$preset/edgc/hf" --tasks code_word_order \
        --include-path "$run/tasks" --output "$run/$preset" 2>"$run/evaluate.out" ||
        { cat -- "$run/evaluate.out" >&2 && exit 1; }
    "$python" tools/report.py "$run/$preset"
    "$python" -c 'import json, sys; sys.exit(json.load(open(sys.argv[1]))["dp_bytes_ratio"] >= 1)' \
        "$run/$preset/summary.json" || { say "with the preset $preset nothing was compressed" >&2 && exit 1; }
done
say "done after $SECONDS s"
