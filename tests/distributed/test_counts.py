"""What a run says it has sent for gradients, against what its collectives were given, by whomever."""

import shlex
from pathlib import Path

import pytest

from edgc.observe.events import read_events
from tests.distributed.megatron_runs import TINY_GPT, train
from tests.distributed.modes import results

PIPELINE = [*TINY_GPT, "--train-iters", "3", "--pipeline-model-parallel-size", "2"]
EDGC = {
    "dense": "--edgc --edgc-engine dense --edgc-window 2",
    "dense, distributed optimizer": "--use-distributed-optimizer --edgc --edgc-engine dense --edgc-window 2",
    "paper, with its warm-up": "--edgc --edgc-preset paper --edgc-static-rank 8 --edgc-window 2",
    "default": "--edgc --edgc-window 2 --edgc-static-rank 8 --edgc-warmup-fraction 0.4",
    "not fused": "--edgc --edgc-window 2 --edgc-static-rank 8 --edgc-no-fuse-embedding-sync",
    "int8": "--edgc --edgc-engine int8 --edgc-window 2 --edgc-warmup-fraction 0.4",
    "slow link": "--edgc --edgc-window 2",  # over loopback so small a model takes longer to compress than to send
    # a link so slow that it compresses; the rows and the sampled entries that it measures count as well
    "volume": "--edgc --edgc-volume 12 --edgc-window 2 --edgc-link-gbps 0.05 --edgc-iteration-sampling-rate 1",
    # the last chunk's buckets are one group, of which the tied embedding is one
    "virtual, distributed optimizer": "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 "
    "--use-distributed-optimizer --edgc --edgc-preset paper --edgc-static-rank 8 --edgc-warmup-fraction 1 "
    "--edgc-fuse-embedding-sync --edgc-window 2",
    "three units, distributed optimizer": "--num-layers 8 --use-distributed-optimizer --edgc --edgc-engine int4 "
    "--edgc-warmup-fraction 0 --edgc-window 2",
    "untied": "--untie-embeddings-and-output-weights --edgc --edgc-engine dense --edgc-window 2",
}
FUSED = {
    "default",
    "int8",
    "slow link",
    "volume",
    "virtual, distributed optimizer",
    "three units, distributed optimizer",
}


def test_every_gradient_byte_is_counted_whoever_sends_it(tmp_path: Path) -> None:
    runs = [{"name": name, "arguments": [*PIPELINE, *shlex.split(flags)]} for name, flags in EDGC.items()]
    next(run for run in runs if run["name"].startswith("three units"))["unit_bytes"] = 1
    left = results(runs, tmp_path)
    for name, processes in left.items():
        reference = left["untied" if name == "untied" else "dense"]
        for one, plain in zip(processes, reference, strict=True):
            assert "failed" not in one, one["failed"]
            sent, dense = one["bytes"][:2]
            assert sent == pytest.approx(one["finalize_bytes"]), name
            # whatever a run sends itself, it is measured against the same dense run
            if "distributed" not in name:
                assert dense == pytest.approx(plain["bytes"][0]), name
        assert ("tied embedding" in processes[0]["stages"]) == (name in FUSED)
    assert all(one["bytes"][0] == one["bytes"][1] for one in left["dense"])
    for one in left["virtual, distributed optimizer"]:
        assert one["bytes"][0] == pytest.approx(one["bytes"][1], rel=1e-3), "but for the padding of buckets"
    assert all(one["bytes"][0] < one["bytes"][1] / 6 for one in left["volume"])
    # a scatter of 4 bits against one of 32; sums for everyone would be twice as many bytes
    assert all(one["bytes"][0] < one["bytes"][1] / 7 for one in left["three units, distributed optimizer"])
    embedding = 256 * 64 * 4  # of the vocabulary and the width; each process is on the first or on the last stage
    # where nothing pays all is Megatron's own, but for one sum over four processes in the place of two over two each
    assert [one["bytes"][1] - one["bytes"][0] for one in left["slow link"]] == [3 * (2 - 1.5) * embedding] * 4
    extra = [a["bytes"][0] - b["bytes"][0] for a, b in zip(left["dense"], left["untied"], strict=True)]
    assert extra == [3 * embedding] * 4


@pytest.mark.slow
def test_the_log_says_what_all_of_it_was(tmp_path: Path) -> None:
    flags = "--bf16 --use-distributed-optimizer --edgc --edgc-preset paper --edgc-static-rank 8 --edgc-window 2"
    output = train([*PIPELINE, *shlex.split(flags), "--edgc-log-dir", str(tmp_path)])
    assert (
        "tied embedding summed over first and last stage by the host, counted, not compressed: 65.5 kB a st" in output
    )
    start, *_, last = read_events(tmp_path)
    assert (start["embedding_sum"], start["gradient_bytes"]) == ("apart", 4)
    for suffix in ("", "_dense"):
        parts = [last[f"{what}_bytes{suffix}"] for what in ("dp", "param", "pp")]
        assert last[f"total_bytes{suffix}"] == sum(parts) and min(parts) > 0
    ratio = last["dp_bytes_dense"] / last["dp_bytes"]
    assert f", {ratio:.1f}x fewer than in fp32, {ratio / 2:.1f}x fewer than in bf16" in output
    ratio = last["total_bytes_dense"] / last["total_bytes"]
    (line,) = (line for line in output.splitlines() if line.startswith("edgc | total "))
    assert line.endswith(f" kB, {ratio:.1f}x fewer")
