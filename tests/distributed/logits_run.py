"""Load a checkpoint with Megatron itself, in one process, and leave the logits of given tokens.

    python tests/distributed/logits_run.py TOKENS.pt LOGITS.pt MEGATRON'S FLAGS ...

The flags must end training where the checkpoint stands.
"""

import os
import socket
import sys

import torch
from torch.nn import Module

from megatron.edgc.recipes import cpu

cpu.redirect()

from megatron.edgc.recipes.pretrain import train  # noqa: E402


def main() -> None:
    tokens, logits = sys.argv[1:3]
    sys.argv[1:3] = []
    with socket.create_server(("localhost", 0)) as free:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
    chunks: list[Module] = []

    def keep(wrapped: list[Module]) -> list[Module]:
        chunks.extend(wrapped)
        return wrapped

    train(True, [keep])
    (model,) = chunks
    batch = torch.load(tokens)
    places = torch.arange(batch.shape[1])
    with torch.no_grad():
        left = model.eval()(batch, places.expand_as(batch), (places > places.unsqueeze(1))[None, None])
    torch.save(left, logits)


if __name__ == "__main__":
    main()
