#!/usr/bin/env bash
# Everything around a paper's run with a tiny model on this machine, in a few minutes: data, both twins through their own
# scripts, one of them stopped in mid-run and started again, export, zero-shot, report.
#
#     bash scripts/rehearse.sh          ends with runs/rehearsal/{report.html,summary.json,zero_shot.md}
set -euo pipefail

cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
bash scripts/setup_env.sh
python=.venv/bin/python
run=runs/rehearsal
export MODEL=tiny DATA=$run/data/stdlib RUN=$run CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
rm -rf -- "$run"
mkdir -p -- "$run"
say() { printf 'rehearse: %s\n' "$*"; }

say "data: the interpreter's standard library"
"$python" tools/preprocess_data.py --python-stdlib --train-sentencepiece 512 --validation-fraction 0.05 \
    --output-prefix "$DATA"

# Loopback is no network, so ranks are planned for a link of 0.05 Gbit/s.
flags=(--edgc-preset balanced --edgc-link-gbps 0.05)
say "training both twins, logs in $run/{dense,edgc}/log.txt; EDGC's is stopped after iteration 50"
bash scripts/pretrain_gpt2_12b_baseline.sh >"$run/dense.out" 2>&1
bash scripts/pretrain_gpt2_12b_edgc.sh "${flags[@]}" >"$run/edgc.out" 2>&1 &
script=$!
until (($(cat -- "$run/edgc/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0) >= 50)); do
    kill -0 "$script" || { tail -n 20 -- "$run/edgc.out" >&2 && exit 1; }
    sleep 0.2
done
kill -TERM "$script"
wait "$script" || true
tail -n 1 -- "$run/edgc.out"
bash scripts/pretrain_gpt2_12b_edgc.sh "${flags[@]}" >>"$run/edgc.out" 2>&1
grep -E '^edgc: (going on|finished)' -- "$run/edgc.out"

say "zero-shot: the order of words in modules that were in no corpus"
"$python" - >"$run/word_order.jsonl" <<'PYTHON'
import json
import random
import sysconfig
from pathlib import Path

random.seed(1)
modules = sorted(Path(sysconfig.get_path("stdlib"), "test").glob("test_*.py"))
for path in random.sample(modules, 120):
    lines = path.read_text(errors="ignore").splitlines(keepends=True)
    places = [place for place in range(8, len(lines)) if 4 <= len(lines[place].split()) <= 10]
    for place in random.sample(places, min(4, len(places))):
        words = lines[place].split()
        orders = sorted({" ".join(order) for order in (words, *(random.sample(words, len(words)) for _ in range(3)))})
        if len(orders) == 4:
            context = "".join(lines[place - 8 : place])[-100:]  # about what the model can read
            indent = lines[place][: -len(lines[place].lstrip())]
            print(json.dumps({"context": context + indent, "choices": orders, "answer": orders.index(" ".join(words))}))
PYTHON
for twin in dense edgc; do
    "$python" tools/export_hf.py --load "$run/$twin/checkpoints" --output "$run/$twin/hf" >/dev/null
done
HF_HUB_OFFLINE=1 "$python" tools/evaluate.py dense="$run/dense/hf" edgc="$run/edgc/hf" --tasks word_order \
    --include-path configs/tasks --output "$run" 2>"$run/evaluate.out" || { cat -- "$run/evaluate.out" >&2 && exit 1; }
"$python" tools/report.py "$run"
say "done after $SECONDS s"
