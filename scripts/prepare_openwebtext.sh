#!/usr/bin/env bash
# OpenWebText from the Hugging Face hub to Megatron's indexed files, with GPT-2's tokenizer.
#
#     bash scripts/prepare_openwebtext.sh [arguments of tools/preprocess_data.py]
#
# The same command resumes after an interruption. From the environment:
#     DATA         path that the files' names start with; default runs/data/openwebtext in this repository
#     HF_DATASET   another data set: a name on the hub, a folder, or a .parquet, .json, .jsonl or .csv file
#     TOKENIZER    gpt2; any other Hugging Face name or folder; or "sentencepiece", to train 51,200 pieces
set -euo pipefail

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
bash "$root/scripts/setup_env.sh"

tokenizer=(--hf-tokenizer "${TOKENIZER:-gpt2}")
if [[ ${TOKENIZER:-} == sentencepiece ]]; then
    tokenizer=(--train-sentencepiece 51200) # a multiple of 1024: Megatron adds no padding up to TP 8
fi
exec "$root/.venv/bin/python" "$root/tools/preprocess_data.py" --hf-dataset "${HF_DATASET:-Skylion007/openwebtext}" \
    "${tokenizer[@]}" --validation-fraction 0.0005 --output-prefix "${DATA:-$root/runs/data/openwebtext}" "$@"
