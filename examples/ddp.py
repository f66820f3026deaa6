"""EDGC in torch's DistributedDataParallel: a small language model on text that it makes, against dense averages.

    python examples/ddp.py                 # 2 processes on the CPU, in under a minute
    torchrun --nproc-per-node 2 examples/ddp.py --iterations 300

Prints the loss and the bytes that each process sends for gradients, dense and with each preset that is named.
"""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import edgc

WORDS, CONTEXT, WIDTH = 64, 16, 128
BATCH = 32  # a process


class Model(nn.Module):
    """A transformer of two layers that predicts each next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.words(text) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        logits: Tensor = self.output(self.layers(hidden, mask, is_causal=True))
        return logits


def text(step: int, process: int) -> Tensor:
    """(batch, context + 1) words of a Markov chain: each is followed by one of three others."""
    generator = torch.Generator().manual_seed(1000 * step + process)
    following = torch.randint(WORDS, (WORDS, 3), generator=torch.Generator().manual_seed(0))
    words = [torch.randint(WORDS, (BATCH,), generator=generator)]
    for _ in range(CONTEXT):
        words.append(following[words[-1], torch.randint(3, (BATCH,), generator=generator)])
    return torch.stack(words, dim=1)


def train(preset: str, iterations: int) -> tuple[float, float]:
    """Mean loss of the last 20 steps over all processes, and bytes that this one sends."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    state = None
    if preset != "dense":
        # Within one machine no compression pays. EDGC compresses as it would on a link of 1 Gbit/s.
        settings = {"preset": preset, "window": max(2, iterations // 5), "link_gbps": 1.0}
        config = edgc.EDGCConfig.from_preset(**settings)
        state = edgc.attach(model, config, iterations=iterations)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    losses = []
    for step in range(iterations):
        words = text(step, dist.get_rank())
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # averages the gradients
        optimizer.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-20:]).mean()
    dist.all_reduce(last)
    gradients = sum(parameter.nbytes for parameter in model.parameters()) * iterations
    dense = 2 * gradients * (dist.get_world_size() - 1) / dist.get_world_size()
    return float(last) / dist.get_world_size(), dense if state is None else state.report.bytes.gradients.sent


def main(process: int, processes: int, port: int, presets: list[str], iterations: int) -> None:
    if process >= 0:  # else torchrun has set the environment
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
        os.environ["RANK"] = str(process)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [(preset, *train(preset, iterations)) for preset in ("dense", *presets)]
    if dist.get_rank() == 0:
        print(f"\n{'averages':<10}{'loss':>8}{'MB sent':>10}{'fewer':>8}")
        for preset, loss, sent in rows:
            print(f"{preset:<10}{loss:>8.4f}{sent / 1e6:>10.2f}{rows[0][2] / sent if sent else 1:>7.1f}x")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=["balanced", "fast"], help="presets of EDGC to compare")
    parser.add_argument("--iterations", type=int, default=150)
    options = parser.parse_args()
    if "RANK" in os.environ:
        main(-1, 0, 0, options.presets, options.iterations)
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(main, (2, port, options.presets, options.iterations), nprocs=2)
