"""After a run Megatron has all of its functions again, also after one that failed."""

from pathlib import Path

from tests.distributed.megatron_runs import TINY_GPT
from tests.distributed.modes import results


def test_megatron_has_its_functions_again(tmp_path: Path) -> None:
    pipeline = [*TINY_GPT, "--train-iters", "2", "--pipeline-model-parallel-size", "2"]
    edgc = ["--edgc", "--edgc-fuse-embedding-sync", "--edgc-pp", "backward:powersgd:8", "--edgc-static-rank", "8"]
    saving = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "2"]
    runs = {
        "trained": [*edgc, *saving],
        "failed": [*edgc, "--exit-on-missing-checkpoint", "--load", str(tmp_path / "nowhere")],
    }
    left = results([{"name": name, "arguments": [*pipeline, *flags]} for name, flags in runs.items()], tmp_path)
    for name in runs:
        for rank in left[name]:
            assert rank["replaced"] == []
            assert ("failed" in rank) == (name == "failed"), rank.get("failed")
