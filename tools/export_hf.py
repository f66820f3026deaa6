"""Turn a Megatron checkpoint into a Hugging Face GPT-2 folder: config, fp32 weights and tokenizer.

    python tools/export_hf.py --load runs/gpt/checkpoints --output runs/gpt/hf

reads the newest iteration by Megatron's tracker file, in the format ``torch_dist`` or ``torch``, of any tensor- and
pipeline-parallel size, without a GPU or a process group. Shape and tokenizer come from the arguments that Megatron
saves with the weights. docs/evaluate.md says what is handled and what is refused.
"""

import os
import shutil
import sys
import tempfile
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

if __name__ == "__main__":
    import _root  # noqa: F401

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers.utils.logging import disable_progress_bar

from tools.export.checkpoint import ExportError, iteration_folder, read
from tools.export.gpt2 import check_arguments, gpt2, padding_doubt
from tools.export.record import RECORD
from tools.export.tokenizer import build_tokenizer
from tools.shared.command import command_parser, say_error
from tools.shared.files import write_json


def export(args: Namespace) -> None:
    """Do what the command line asks for. Raises ``ExportError``."""
    output: Path = args.output
    if output.exists() and not args.overwrite:
        raise ExportError(f"{output}: exists; see --overwrite")
    if output.exists() and not (output / RECORD).is_file():
        raise ExportError(f"{output}: is no export of this tool, so it is not overwritten")
    disable_progress_bar()  # type: ignore[no-untyped-call]
    checkpoint = read(iteration_folder(args.load, args.iteration))
    check_arguments(checkpoint.args)
    tokenizer = build_tokenizer(checkpoint.args, args.tokenizer_model)
    model = gpt2(checkpoint, tokenizer)
    tokens, rows = len(tokenizer), len(checkpoint.tensors["embedding.word_embeddings.weight"])
    if doubt := padding_doubt(checkpoint, tokens):
        print(f"export_hf: warning: {doubt}", file=sys.stderr)
    tokenizer.model_max_length = checkpoint.args.seq_length
    record = {
        "checkpoint": f"{checkpoint.folder.parent.name}/{checkpoint.folder.name}",
        "format": checkpoint.format,
        "tokens": tokens,
        "padding": rows - tokens,
        "parameters": model.num_parameters(),
        "versions": {name: version(name) for name in ("megatron-core", "torch", "transformers", "tokenizers")},
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as folder:
        draft = Path(folder, output.name)
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        write_json(draft / RECORD, record)
        if output.exists():
            shutil.rmtree(output)
        draft.rename(output)
    print(
        f"{output}: GPT-2 of {record['parameters']:,} parameters from {checkpoint.folder} ({checkpoint.format}), "
        f"{tokens} tokens, {rows - tokens} rows of padding left out"
    )


def main(argv: list[str] | None = None) -> int:
    """Export the checkpoint in ``argv``; returns the exit status."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--load", type=Path, required=True, metavar="FOLDER", help="the training run's --save")
    add("--iteration", type=int, metavar="N", help="which of its checkpoints (default: the newest)")
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder to write")
    add("--tokenizer-model", type=Path, metavar="PATH", help="where the run's tokenizer is now (default: as then)")
    add("--overwrite", action="store_true", help="replace an earlier export")
    try:
        export(parser.parse_args(argv))
    except ExportError as error:
        say_error("export_hf", error)
        return 1
    except OSError as error:
        # a full disk has no name
        say_error("export_hf", f"{error.filename}: {error.strerror}" if error.filename else error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
