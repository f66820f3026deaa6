"""EDGC as the communication hook of torch's DistributedDataParallel, on gloo processes."""

import faulthandler
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import edgc
from edgc.compress.reducer import GradientReducer
from edgc.compress.router import Router
from edgc.config import ConfigError, EDGCConfig
from edgc.hosts import module, steps
from edgc.hosts.ddp import attach
from edgc.hosts.units import MAX_UNITS
from edgc.observe.events import read_events
from edgc.plan.rank_plan import Summing
from edgc.plan.times import trials
from edgc.plan.times.comm_cost import LinearCost, StageCost
from edgc.timing import Spans
from tests.distributed.gloo import run_on_ranks

WIDTH, TOKENS, CONTEXT = 64, 128, 4
PAPER = EDGCConfig.from_preset(
    "paper", window=4, rmin=4, rmax=12, warmup_fraction=0.1, entropy_stability=10.0, iteration_sampling_rate=0.5
)
BALANCED = EDGCConfig.from_preset(static_rank=8, window=10)
# of presets, and the share of the fall of the loss that each may lose; when written: 0.1, 1.1 and 4.3 %
VOLUMES = {"safe": (8, 0.01), "balanced": (24, 0.03), "fast": (48, 0.1)}
BUDGET = EDGCConfig.from_preset(volume=8.0, window=4, iteration_sampling_rate=0.5, link_gbps=0.01, fidelity_share=0.005)


class Net(nn.Module):
    """Predicts the next token from the last few; one of its layers may stay unused."""

    def __init__(self, unused: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.mix = nn.Linear(CONTEXT * WIDTH, 2 * WIDTH)
        self.hidden = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.output = nn.Linear(2 * WIDTH, TOKENS)
        if unused:
            self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.mix(self.embedding(tokens).flatten(1)).relu()
        logits: Tensor = self.output(self.norm(mixed + self.hidden(mixed).relu()))
        return logits


def batch(rank: int, step: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Tokens whose next one follows from the last two, and some noise."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(TOKENS, (size, CONTEXT), generator=generator) // 4 * 4 % 32
    return tokens, (tokens[:, -1] + tokens[:, -2] + torch.randint(4, (size,), generator=generator)) % TOKENS


def net(**options: Any) -> Net:
    torch.manual_seed(3)
    return Net(**options)


class Training:
    """A DDP model, its optimizer and EDGC; ``config`` None: DDP's own averages."""

    def __init__(self, rank: int, config: EDGCConfig | None, iterations: int = 40, **ddp: Any):
        self.rank, self.step_number = rank, 0
        self.net = net(unused=ddp.pop("unused", False))
        self.model = DistributedDataParallel(self.net, **ddp)
        self.state = None if config is None else attach(self.model, config, iterations=iterations)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 3e-3)

    def backward(self, micro_batches: int = 1) -> float:
        self.optimizer.zero_grad()
        parts = [one.chunk(micro_batches) for one in batch(self.rank, self.step_number)]
        for place, (tokens, targets) in enumerate(zip(*parts, strict=True)):
            loss = nn.functional.cross_entropy(self.model(tokens), targets) / micro_batches
            if place < micro_batches - 1:
                with self.model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        self.step_number += 1
        return float(loss.detach())

    def train(self, steps: int, micro_batches: int = 1) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(self.backward(micro_batches))
            self.optimizer.step()
        return losses

    @property
    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.net.named_parameters() if p.grad is not None}

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def errors(self) -> dict[str, Tensor]:
        """Of this process, in the shape of the parameters."""
        assert self.state is not None
        kept = {n: e for r in self.state.stage.reducers for n, e in r.state.feedback.packed.items()}
        return {
            name: kept[name].values().view_as(p).clone() if name in kept else torch.zeros_like(p)
            for name, p in self.net.named_parameters()
        }


def mean(tensors: Mapping[str, Tensor], ranks: int = 2) -> dict[str, Tensor]:
    total = {name: tensor.double() for name, tensor in tensors.items()}
    for tensor in total.values():
        dist.all_reduce(tensor)
    return {name: tensor / ranks for name, tensor in total.items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


LOW_RANK = EDGCConfig.from_preset("paper", static_rank=8, warmup_fraction=0, window=4)
SMALL = {"bucket_cap_mb": 0.05}  # the model in several buckets, and as many units

# Of DDP, micro-batches, settings
LAYOUTS: dict[str, tuple[dict[str, Any], int, EDGCConfig]] = {
    "one bucket": ({}, 1, LOW_RANK),
    "several buckets": (SMALL, 1, LOW_RANK),
    "gradients as views of buckets": ({**SMALL, "gradient_as_bucket_view": True}, 1, LOW_RANK),
    "static graph": ({**SMALL, "static_graph": True}, 1, LOW_RANK),
    "accumulated gradients": (SMALL, 2, LOW_RANK),
    "accumulated in views of buckets": ({**SMALL, "gradient_as_bucket_view": True}, 2, LOW_RANK),
    "balanced": (SMALL, 1, BALANCED),
    "4 bits": (SMALL, 1, EDGCConfig.of(engine="int4", warmup_fraction=0.0)),
}


def lost_in_step(training: Training, alone: Net, micro_batches: int = 1) -> float:
    """What of a step's averaged gradients is in neither result nor errors, relative to the largest entry.

    ``alone``: another model, which is overwritten.
    """
    alone.load_state_dict(training.parameters)
    tokens, targets = batch(training.rank, training.step_number)
    alone.zero_grad()
    nn.functional.cross_entropy(alone(tokens), targets).backward()
    own = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    before = mean(training.errors(), 1)
    training.backward(micro_batches)
    after, result = mean(training.errors(), 1), training.gradients
    expected = {name: gradient + before[name] - after[name] for name, gradient in mean(own).items()}
    return max(float((expected[name] - result[name]).abs().max() / expected[name].abs().max()) for name in own)


def lost(rank: int, ddp: dict[str, Any], micro_batches: int, config: EDGCConfig) -> list[float]:
    """The same of the first steps of a training."""
    training, alone = Training(rank, config, **ddp), net()
    found = []
    for _ in range(4):
        found.append(lost_in_step(training, alone, micro_batches))
        training.optimizer.step()
    assert any(error.abs().max() > 0 for error in training.errors().values())
    return found


def ways(rank: int) -> dict[str, dict[str, Tensor]]:
    """Parameters after some steps, by what reduces and how."""
    several = Training(rank, LOW_RANK, **SMALL)
    assert several.state is not None
    under_way = []
    reduce = several.state._reduce

    def noting(unit: Any) -> None:
        reduce(unit)
        under_way.append(sum(not unit.complete for unit in several.state.stage.units))  # type: ignore[union-attr]

    several.state._reduce = noting  # type: ignore[method-assign]
    several.train(6)
    assert max(under_way) > 0, "a unit's reduction starts while others still wait for gradients"
    bare = net()
    state = edgc.EDGCState(bare, LOW_RANK, iterations=40, unit_bytes=several.model.bucket_bytes_cap)
    optimizer = torch.optim.Adam(bare.parameters(), 3e-3)
    for step in range(6):
        tokens, targets = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(bare(tokens), targets).backward()
        state.step()
        optimizer.step()
    views, plain, dense = (
        Training(rank, config, **options)
        for config, options in (
            (LOW_RANK, {**SMALL, "gradient_as_bucket_view": True, "static_graph": True}),
            (None, {}),
            (EDGCConfig.of(engine="dense"), SMALL),
        )
    )
    by_hand = Training(rank, None, **SMALL)
    own = edgc.EDGCState(by_hand.net, LOW_RANK, iterations=40, unit_bytes=by_hand.model.bucket_bytes_cap)
    by_hand.model.register_comm_hook(own, edgc.ddp_hook)  # nothing has started it
    for training in (views, plain, dense, by_hand):
        training.train(6)
    return {
        "DDP": plain.parameters,
        "registered by hand": by_hand.parameters,
        "dense": dense.parameters,
        "hook": several.parameters,
        "views": views.parameters,
        "step": dict(bare.named_parameters()),
    }


def as_given(preset: str) -> EDGCConfig:
    """A preset with its own volume, in a run of few windows, with enough samples for parameters so small."""
    given = {"window": 10, "iteration_sampling_rate": 0.5, "link_gbps": 0.01, "fidelity_share": 0.005}
    return EDGCConfig.from_preset(**{"preset": preset, **given})


class Forgetful(Training):
    """Without error feedback."""

    def backward(self, micro_batches: int = 1) -> float:
        loss = super().backward(micro_batches)
        assert self.state is not None
        for reducer in self.state.stage.reducers:
            reducer.state.feedback.packed.clear()
        return loss


def trained(rank: int, folder: str) -> dict[str, list[float]]:
    """Losses of some trainings; the last without error feedback at a low rank."""
    settings = {
        "dense": None,
        "paper": PAPER.replace(log_dir=f"{folder}/paper"),
        **{name: as_given(name).replace(log_dir=f"{folder}/{name}") for name in VOLUMES},
        "rank": BALANCED,
    }
    losses = {name: Training(rank, config, 120).train(120) for name, config in settings.items()}
    return {**losses, "bad": Forgetful(rank, LOW_RANK.replace(static_rank=4), 120).train(120)}


def resumed(rank: int, config: EDGCConfig, folder: str) -> dict[str, Any]:
    """A run with a checkpoint within a window, and one that goes on from it."""
    live = Training(rank, config, 20, **SMALL)
    live.train(9)
    assert live.state is not None
    state, path = live.state.state_dict(), Path(folder, "state.pt")
    kept, plan = live.errors(), live.state.driver.plan
    shared = plan.matrix_ranks[0] if plan.matrix_ranks else None
    if rank == 0:
        torch.save(state, path)
    dist.barrier()
    model, optimizer = live.parameters, live.optimizer.state_dict()
    optimizer = torch.load(_saved(optimizer, folder, rank))
    live.train(11)
    other = Training(rank, config, 20, **SMALL)
    assert other.state is not None
    other.net.load_state_dict(model)
    other.optimizer.load_state_dict(optimizer)
    other.state.load_state_dict(torch.load(path, weights_only=True))
    same_errors = same(kept, other.errors())
    other.step_number = 9
    other.train(11)
    reports = [training.state.report for training in (live, other)]
    return {
        "errors": same_errors,
        "parameters": same(live.parameters, other.parameters),
        "ranks": [(report.plan.ranks, report.plan.matrix_ranks) for report in reports],
        "shared": shared,
        "entropy": [report.stages[0].entropy for report in reports],
        "bytes": [report.bytes.gradients.sent for report in reports],
        "sums": mean(kept, 1),
    }


def _saved(state: Any, folder: str, rank: int) -> Path:
    path = Path(folder, f"optimizer-{rank}.pt")
    torch.save(state, path)
    return path


def at_another_size(rank: int, folder: str) -> dict[str, Tensor]:
    """The errors of a run at another number of processes that goes on from ``resumed``'s checkpoint."""
    training = Training(rank, PAPER, 20, **SMALL)
    assert training.state is not None
    training.state.load_state_dict(torch.load(Path(folder, "state.pt"), weights_only=True))
    errors = mean(training.errors(), 1)
    # gradients of other numbers of processes have other norms, and would look like spikes
    assert all(reducer.state.norms.values() is None for reducer in training.state.stage.reducers)
    training.train(2)
    assert all(torch.isfinite(p).all() for p in training.parameters.values())
    return errors


def alone(rank: int, folder: str) -> None:
    """A run of one process, which has nothing to compress."""
    training = Training(rank, BUDGET, 20)
    training.train(10)
    assert training.state is not None
    torch.save(training.state.state_dict(), Path(folder, "alone.pt"))


def joined(rank: int, folder: str) -> tuple[str, float, float]:
    """Where it goes on at more processes: engine, fewer bytes in the last window, and those with ``reset_state``."""
    ratios = []
    for reset in (False, True):
        training = Training(rank, BUDGET.replace(reset_state=reset), 20)
        state = training.state
        assert state is not None
        state.load_state_dict(torch.load(Path(folder, "alone.pt"), weights_only=True))
        training.train(20 if reset else 10)
        assert state.report is not None
        (seen,) = state.report.stages
        ratios.append(seen.bytes.host / seen.bytes.sent)
    return state.config.engine, ratios[0], ratios[1]


def overflowing(rank: int) -> dict[str, Any]:
    """A step in which process 1 has gradients that overflow, with a loss scale."""
    found: dict[str, Any] = {}
    runs, entropies = {}, []
    for scaled in (False, True):
        bare = net()
        model = DistributedDataParallel(bare, **SMALL)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        state = attach(model, LOW_RANK.replace(iteration_sampling_rate=1.0, window=8), iterations=40, scaler=scaler)
        optimizer = torch.optim.SGD(bare.parameters(), 0.1)
        for step in range(6):
            optimizer.zero_grad()
            tokens, targets = batch(rank, step)
            loss = nn.functional.cross_entropy(model(tokens), targets)
            overflows = scaled and step == 3
            before = {n: e.values().clone() for r in state.stage.reducers for n, e in r.state.feedback.packed.items()}
            factors = [r.state.state_dict()["engine"] for r in state.stage.reducers]
            measured = [len(r.observer.measurements.entropy) for r in state.stage.reducers]
            # the gradient of the last layer, of which the first unit consists, overflows last on the way back
            scaler.scale(loss * torch.inf if overflows and rank == 1 else loss).backward()
            if overflows:
                nan = [bool(torch.isnan(p.grad).all()) for p in bare.parameters() if p.grad is not None]
                after = {n: e.values() for r in state.stage.reducers for n, e in r.state.feedback.packed.items()}
                same_factors = all(
                    torch.equal(old[key].message, new[key].message)
                    for old, new in zip(
                        factors, (r.state.state_dict()["engine"] for r in state.stage.reducers), strict=True
                    )
                    for key in old
                )
                seen = [len(r.observer.measurements.entropy) for r in state.stage.reducers]
                found |= {"nan": all(nan), "errors": same(before, after), "factors": same_factors}
                found["measurements"] = seen == measured
                weights = {name: p.detach().clone() for name, p in bare.named_parameters()}
            scaler.step(optimizer)
            scaler.update()
            if overflows:
                found["weights"] = same(weights, {name: p.detach() for name, p in bare.named_parameters()})
                found["scale"] = scaler.get_scale()
            if step == 2:
                runs[scaled] = {name: p.detach().clone() for name, p in bare.named_parameters()}
                state._report(last=False)
                assert state.report is not None
                entropies.append(state.report.stages[0].entropy)
        found["finite"] = all(bool(torch.isfinite(p).all()) for p in bare.parameters())
    found["scale changes nothing"] = same(runs[False], runs[True]) and entropies[0] == pytest.approx(entropies[1])
    return found


def partly_overflowing(rank: int) -> tuple[bool, bool, bool]:
    """One parameter's gradient overflows on one process: whether all gradients are NaN, whether errors stay, and
    whether the next step is as if that one had not been.
    """
    trainings = [Training(rank, LOW_RANK, **SMALL) for _ in range(2)]
    for training in trainings:
        training.train(2)
    broken, whole = trainings
    before = broken.errors()
    handle = broken.net.mix.bias.register_hook(lambda gradient: gradient * (torch.inf if rank == 1 else 1.0))
    broken.backward()
    handle.remove()
    nan = all(bool(torch.isnan(gradient).all()) for gradient in broken.gradients.values())
    kept = same(before, broken.errors())
    for training in trainings:
        training.step_number = 2
        training.backward()
    return nan, kept, same(broken.gradients, whole.gradients)


def not_finite(rank: int) -> list[int]:
    """How many warnings come of two steps that are not finite: without a scaler, with a disabled one, with one."""
    counts = []
    for enabled in (None, False, True):
        bare, warnings = net(), list[str]()
        scaler = None if enabled is None else torch.amp.GradScaler("cpu", enabled=enabled)
        state = attach(bare, LOW_RANK, iterations=40, scaler=scaler)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "warn", lambda message, group, found=warnings: found.append(message))
            for _ in range(2):
                for parameter in bare.parameters():
                    parameter.grad = torch.full_like(parameter, torch.inf if rank == 1 else 1.0)
                state.step()
        counts.append(sum("gradients are not finite" in warning for warning in warnings))
    return counts


def trained_once(rank: int) -> dict[str, Any]:
    """The state after a step."""
    training = Training(rank, LOW_RANK)
    training.train(1)
    assert training.state is not None
    return training.state.state_dict()


def thawed() -> None:
    """A layer that begins to train after EDGC was given the module."""
    module = net()
    module.hidden.requires_grad_(False)
    state = attach(module, LOW_RANK, iterations=40)
    module.hidden.requires_grad_(True)
    module(batch(0, 0)[0]).sum().backward()
    state.step()


def sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    attach(fully_shard(net(), mesh=init_device_mesh("cpu", (2,))), LOW_RANK, iterations=40)


def half_frozen(layer: int) -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    layers[layer].requires_grad_(False)
    return layers


def other_weights(rank: int) -> None:
    """A layer starts from values that each process has by itself."""
    module = net()
    nn.init.constant_(module.hidden.weight, rank)
    state = attach(module, LOW_RANK, iterations=40)
    module(batch(rank, 0)[0]).sum().backward()
    state.step()


def after_a_misfit() -> None:
    """A step after a script has caught that the state is of a model with a layer less."""
    torch.manual_seed(3)
    layers = [nn.Linear(32, 64), nn.Linear(64, 32)]
    state, less = (attach(nn.Sequential(*some), BUDGET, iterations=40) for some in (layers, layers[:1]))
    with suppress(ConfigError):
        state.load_state_dict(less.state_dict())
    for layer in layers:
        layer.weight.grad, layer.bias.grad = torch.ones_like(layer.weight), torch.ones_like(layer.bias)
    state.step()


def refused(rank: int) -> dict[str, str]:
    """What is not taken, and why."""
    cases = {
        "unused": lambda: Training(rank, LOW_RANK, find_unused_parameters=True),
        "pipeline": lambda: attach(DistributedDataParallel(net()), "optimus", iterations=40),
        "rank": lambda: Training(rank, PAPER.replace(rmin=None, rmax=256)),
        "window": lambda: Training(rank, PAPER.replace(window=100)),
        "no gradient": lambda: attach(net(), LOW_RANK, iterations=40).step(),
        "inside": lambda: attach(nn.Sequential(DistributedDataParallel(net())), LOW_RANK, iterations=40),
        "sharded": sharded,
        "thawed": thawed,
        "engine": lambda: Training(rank, LOW_RANK).state.load_state_dict(  # type: ignore[union-attr]
            Training(rank, EDGCConfig.of(engine="int4")).state.state_dict()  # type: ignore[union-attr]
        ),
        "another module": lambda: edgc.EDGCState(nn.Linear(8, 8), LOW_RANK, iterations=40).load_state_dict(used),
        "complex": lambda: attach(nn.Linear(8, 8, dtype=torch.complex64), LOW_RANK, iterations=40),
        "sparse": lambda: attach(nn.Embedding(8, 8, sparse=True), LOW_RANK, iterations=40),
        "no iterations": lambda: attach(net(), LOW_RANK, iterations=0),
        "part of one": lambda: attach(net(), LOW_RANK, iterations=20.5),  # type: ignore[arg-type]
        "a dict": lambda: attach(net(), {"volume": 24}, iterations=20),  # type: ignore[arg-type]
        "other iterations": lambda: attach(net(), LOW_RANK, iterations=40 + rank).start(),
        "other settings": lambda: attach(net(), LOW_RANK.replace(static_rank=4 + rank), iterations=40).start(),
        "other parameters": lambda: attach(half_frozen(rank), LOW_RANK, iterations=40).start(),
        "other weights": lambda: other_weights(rank),
        "after a misfit": after_a_misfit,
    }
    used = trained_once(rank)
    found = {}
    for name, case in cases.items():
        try:
            case()
            found[name] = ""
        except (ConfigError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def refused_or_not(rank: int) -> tuple[dict[str, str], bool]:
    return refused(rank), never_used(rank) and in_fp64(rank)


def in_fp64(rank: int) -> bool:
    """A volume measures rows of gradients, here of two sums."""
    module = net().double()
    state = attach(module, BUDGET, iterations=20)
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1)
        state.step()
    return all(torch.allclose(one.grad, torch.full_like(one, 1.5), rtol=0.1) for one in module.parameters())


def never_used(rank: int) -> bool:
    """A layer that no step uses, in a static graph."""
    training = Training(rank, LOW_RANK, unused=True, static_graph=True, find_unused_parameters=True)
    losses = training.train(5)
    return losses[-1] < losses[0] and all(bool(torch.isfinite(p).all()) for p in training.parameters.values())


def all_overflows(rank: int) -> tuple[dict[str, Any], tuple[bool, bool, bool], list[int]]:
    return overflowing(rank), partly_overflowing(rank), not_finite(rank)


def test_nothing_is_lost_however_ddp_lays_gradients_out() -> None:
    both = run_on_ranks(all_layouts, 2)
    for name in LAYOUTS:
        for found in both:
            assert max(found[name]) < 1e-5, name


def all_layouts(rank: int) -> dict[str, list[float]]:
    return {name: lost(rank, *layout) for name, layout in LAYOUTS.items()}


def test_hook_and_step_give_the_same_bits_and_dense_is_ddp_itself() -> None:
    first, second = run_on_ranks(ways, 2)
    assert same(first["DDP"], first["dense"])
    assert all(same(first["hook"], first[way]) for way in ("views", "step", "registered by hand"))
    assert not same(first["DDP"], first["hook"])
    assert all(same(first[way], second[way]) for way in first)


def test_presets_train_about_as_well_as_dense_and_a_bad_compressor_does_not(tmp_path: Path) -> None:
    both = run_on_ranks(trained, 2, str(tmp_path))
    end = {name: sum(sum(losses[name][-20:]) for losses in both) / 40 for name in both[0]}
    fall = both[0]["dense"][0] - end["dense"]
    assert end["paper"] - end["dense"] < 0.1 * fall
    assert end["rank"] - end["dense"] < 0.1 * fall
    assert end["bad"] - end["dense"] > 0.2 * fall
    for preset, (volume, share) in VOLUMES.items():
        assert end[preset] - end["dense"] < share * fall, preset
        windows = [event for event in read_events(tmp_path / preset) if event["event"] == "window"]
        assert windows[-1]["dp_bytes_dense"] / windows[-1]["dp_bytes"] == pytest.approx(volume, rel=0.02), preset
    windows = read_events(tmp_path / "paper")[1:]
    used = [window["ranks"][0] for window in windows]
    assert used[0] is None and len(set(used)) > 2, "ranks follow entropy"
    assert windows[-1]["dp_bytes"] < windows[-1]["dp_bytes_dense"] / 2


SHARED_OUT = BALANCED.replace(window=4, iteration_sampling_rate=1.0)  # whose rank is shared out before the checkpoint
ALTERNATING = EDGCConfig.of(engine="alternating", static_rank=8, equalise=True, window=4, iteration_sampling_rate=1.0)


@pytest.mark.parametrize(
    "config", [PAPER, SHARED_OUT, BUDGET, ALTERNATING], ids=["paper", "balanced", "budget", "alternating"]
)
def test_a_resumed_run_is_the_same_run(config: EDGCConfig, tmp_path: Path) -> None:
    both = run_on_ranks(resumed, 2, config, str(tmp_path))
    for found in both:
        assert found["errors"] and found["parameters"]
        for name in ("ranks", "entropy", "bytes"):
            live, other = found[name]
            assert live == other, name
    if config is SHARED_OUT:
        assert all(len(set(found["shared"].values())) > 1 for found in both)
    if config is PAPER:
        (errors,) = run_on_ranks(at_another_size, 1, str(tmp_path))
        for name, total in both[0]["sums"].items():
            torch.testing.assert_close(errors[name], total, rtol=1e-5, atol=1e-8)


def test_a_run_of_one_process_goes_on_at_more_of_them_with_their_own_budget(tmp_path: Path) -> None:
    run_on_ranks(alone, 1, str(tmp_path))
    for engine, resumed_ratio, fresh_ratio in run_on_ranks(joined, 2, str(tmp_path)):
        assert engine == "powersgd" and resumed_ratio > 4 and fresh_ratio > 4


def lengthened(rank: int) -> tuple[int, int, bool]:
    """The windows of a short run and of one ten times as long that goes on from it, and whether both have one plan."""
    config = BUDGET.replace(window=1000)
    before, after = Training(rank, config, 40), Training(rank, config, 400)
    assert before.state is not None and after.state is not None
    before.train(8)
    after.state.load_state_dict(before.state.state_dict())
    drivers = before.state.driver, after.state.driver
    return drivers[0].window, drivers[1].window, drivers[0].plan.formats == drivers[1].plan.formats


def shortened(rank: int) -> list[bool]:
    """Whether a run of so many iterations that goes on from step 8 is told that they are too few."""
    before, told = Training(rank, LOW_RANK, 20), []
    before.train(8)
    assert before.state is not None
    for iterations in (7, 8):
        found = list[str]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "warn", lambda message, group, found=found: found.append(message))
            edgc.EDGCState(net(), LOW_RANK, iterations=iterations).load_state_dict(before.state.state_dict())
        told.append(any(f"is of step 8, and this run has {iterations} iterations" in warning for warning in found))
    return told


def test_a_run_that_has_fewer_iterations_than_are_behind_it_is_told() -> None:
    assert run_on_ranks(shortened, 2) == [[True, False]] * 2


def uneven(rank: int) -> dict[str, dict[str, Tensor]]:
    """Parameters after 4 steps on process 0 and 7 on process 1, by who averages."""
    found = {}
    for name, config in {"DDP": None, "dense": EDGCConfig.of(engine="dense"), "low rank": LOW_RANK}.items():
        training = Training(rank, config)
        with training.model.join():
            training.train(4 + 3 * rank)
        assert training.state is None or training.state.steps == 7
        found[name] = training.parameters
    return found


def test_a_process_that_has_no_more_inputs_joins_as_in_ddp() -> None:
    first, second = run_on_ranks(uneven, 2)
    for name, parameters in first.items():
        assert same(parameters, second[name]), name
    assert same(first["DDP"], first["dense"]) and not same(first["DDP"], first["low rank"])


def a_volume_after_a_rank(rank: int) -> tuple[bool, int, float]:
    """Whether the steps after the resume begin with a warm-up, its end, and the volume of these steps."""
    before = Training(rank, LOW_RANK, iterations=400)
    before.train(200)
    assert before.state is not None
    after = Training(rank, BUDGET, iterations=400)
    assert after.state is not None
    after.state.load_state_dict(before.state.state_dict())
    counted, plan = after.state.stage.byte_counts().gradients, after.state.driver.plan
    after.train(200)
    sent = after.state.stage.byte_counts().gradients - counted
    return plan.summing(200) is Summing.DENSE, plan.first_iteration, sent.fp32 / sent.sent


def test_a_volume_that_takes_the_place_of_a_rank_is_that_of_the_rest_and_begins_with_a_warm_up() -> None:
    for warm, first, volume in run_on_ranks(a_volume_after_a_rank, 2):
        assert warm and first == 204, "a window"
        assert volume == pytest.approx(8.0, rel=0.03)


def test_a_longer_run_has_the_windows_of_its_own_length() -> None:
    assert run_on_ranks(lengthened, 2) == [(2, 20, True)] * 2


def told_of_losses(rank: int) -> list[tuple[float, float, float]]:
    """Of each window its loss, how far it has risen, and how many times its budget the next step gets."""
    training, seen = Training(rank, BUDGET, iterations=80), []
    assert training.state is not None
    for step in range(32):
        training.train(1)
        if step == 13:  # a resumed run knows the losses of the window under way
            state, training = training.state.state_dict(), Training(rank, BUDGET, iterations=80)
            assert training.state is not None
            training.state.load_state_dict(state)
        # a spike of one process's loss, in the steps that the windows ending with steps 16 and 20 know
        training.state.note_loss(torch.tensor(3.0 if rank and 11 <= step < 19 else 1.0))
        if training.state.steps % 4 == 0:
            report = training.state.report
            assert report is not None
            seen.append((report.loss, report.plan.loss_rise, report.plan.relief))
    return seen


def test_steps_send_more_while_the_loss_that_a_user_tells_rises() -> None:
    one, other = run_on_ranks(told_of_losses, 2)
    assert one[1:] == other[1:]
    losses, rises, reliefs = zip(*one, strict=True)
    # the first window ends before its fourth loss is known, and three are too few
    assert math.isnan(losses[0])
    assert losses[1:] == (1, 1, 2, 2, 1, 1, 1) and rises == (0, 0, 0, 1, 1, 0, 0, 0)
    assert reliefs == (1, 1, 1, 2, 4, 2, 1, 1)


def where_no_rank_pays(rank: int) -> tuple[str, tuple[int | None, ...]]:
    """The engine and the ranks of a run that goes on where compressing takes longer than the sum itself."""
    before = Training(rank, PAPER, 20)
    before.train(12)
    module.reduction_cost = lambda *_: StageCost(LinearCost(1.0, 0.1), 0.1, 0.1)  # type: ignore[assignment]
    after = Training(rank, PAPER.replace(rmin=None, rmax=None), 20)
    assert before.state is not None and after.state is not None
    assert before.state.driver.plan.ranks != (None,)
    after.state.load_state_dict(before.state.state_dict())
    after.train(8)
    assert after.state.report is not None
    return after.state.config.engine, after.state.report.plan.ranks


def test_a_resumed_run_whose_link_asks_for_no_compression_has_a_plan_of_none() -> None:
    assert run_on_ranks(where_no_rank_pays, 2) == [("dense", (None,))] * 2


def test_a_step_that_overflows_is_visible_to_the_scaler_and_changes_no_state() -> None:
    for found, partly, warnings in run_on_ranks(all_overflows, 2):
        assert found.pop("scale") == 2.0**9
        assert all(found.values()), found
        assert partly == (True, True, True)
        assert warnings == [1, 1, 0], "who skips such a step needs no warning"


def test_what_cannot_work_is_refused() -> None:
    reasons = {
        "unused": "ConfigError: find_unused_parameters",
        "pipeline": "ConfigError: --edgc-pp = epilogue:powersgd:16",
        "rank": "ConfigError: --edgc-rmax = 256",
        "window": "ConfigError: --edgc-window = 100",
        "no gradient": "RuntimeError: parameters without a gradient in this step: 9",
        "thawed": "RuntimeError: hidden.weight has a gradient, and required none when EDGC was given the module",
        "inside": "ConfigError: Sequential has a DistributedDataParallel inside, which sums gradients itself",
        "sharded": "ConfigError: embedding.weight is a DTensor: EDGC averages gradients of whole parameters",
        "engine": "ConfigError: EDGC state of the engine int4, this run has powersgd; set reset_state to go on without",
        "another module": "ConfigError: the EDGC state has error feedback of",
        "complex": "ConfigError: weight is of torch.complex64: EDGC averages gradients of real numbers",
        "sparse": "ConfigError: weight has sparse gradients, which EDGC does not average",
        "no iterations": "ConfigError: iterations = 0: must be a whole number of at least 1",
        "part of one": "ConfigError: iterations = 20.5: must be a whole number of at least 1",
        "a dict": "ConfigError: config is of type dict: must be an EDGCConfig, or the name of a preset",
        "other iterations": "ConfigError: iterations = 41 on process 1 of the group, 40 on process 0",
        "other settings": "ConfigError: --edgc-static-rank = 5 on process 1 of the group, 4 on process 0",
        "other parameters": "ConfigError: process 1 of the group trains 0.weight (torch.float32, (8, 8)) where process "
        "0 trains 1.weight (torch.float32, (8, 8)): EDGC averages the same parameters",
        "other weights": "ConfigError: hidden.weight has other values on process 1 of the group than on process 0",
        "after a misfit": "RuntimeError: this EDGC state was closed, or a step of it has failed, or a saved state did",
    }
    for found, learned in run_on_ranks(refused_or_not, 2):
        for name, reason in reasons.items():
            assert found[name].startswith(reason), found
        assert learned


def in_16_bits(rank: int, folder: str) -> None:
    model = DistributedDataParallel(net().bfloat16())
    attach(model, BUDGET.replace(log_dir=folder), iterations=60)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(60):
        optimizer.zero_grad()
        tokens, targets = batch(rank, step)
        nn.functional.cross_entropy(model(tokens).float(), targets).backward()
        optimizer.step()


def test_the_bytes_of_a_module_in_16_bits_are_half(tmp_path: Path) -> None:
    run_on_ranks(in_16_bits, 2, str(tmp_path))
    start, *windows = read_events(tmp_path)
    assert start["gradient_bytes"] == 2
    assert 2 * windows[-1]["dp_bytes_dense"] / windows[-1]["dp_bytes"] == pytest.approx(8, rel=0.05)


def dense_in_16_bits(rank: int) -> tuple[bool, tuple[float, ...], bool]:
    """Whether engine ``dense`` gives the gradients of plain DDP, what both send, and whether a plain sum follows
    compression.
    """
    tokens, targets = batch(rank, 0)
    gradients = []
    for dense in (False, True):
        model = DistributedDataParallel(net().bfloat16())
        state = attach(model, EDGCConfig.of(engine="dense", pp="off"), iterations=10) if dense else None
        nn.functional.cross_entropy(model(tokens).float(), targets).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert state is not None
    same_bits = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    model = net().bfloat16()
    later = attach(model, LOW_RANK.replace(warmup_fraction=0.0), iterations=20)
    plain = []
    for step in range(3):
        nn.functional.cross_entropy(model(batch(rank, step)[0]).float(), targets).backward()
        later.step()
        plain.append(later.stage.reducers[0].plain)
        later.driver.plan = replace(later.driver.plan, by_host=True)
    return same_bits, (state.stage.gradient_bytes.sent, state.stage.gradient_bytes.host), plain == [False, True, True]


def test_uncompressed_gradients_of_16_bits_travel_in_16_bits() -> None:
    for same_bits, (sent, by_ddp), plain_again in run_on_ranks(dense_in_16_bits, 2):
        assert same_bits and sent == by_ddp > 0
        assert plain_again, "rounding to 16 bits leaves no error where DDP would keep none"


def strided(rank: int) -> tuple[float, bool]:
    """How far averages are from true ones where a gradient is not contiguous, and whether it stays so."""
    layer = nn.Conv2d(32, 64, 3).to(memory_format=torch.channels_last)
    state = attach(layer, EDGCConfig.of(engine="dense", pp="off"), iterations=10)
    torch.manual_seed(rank)
    for parameter in layer.parameters():
        parameter.grad = torch.randn_like(parameter)
    wanted = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
    for gradient in wanted:
        torch.distributed.all_reduce(gradient)
        gradient /= 2
    state.step()
    apart = [(p.grad - gradient).abs().max() for p, gradient in zip(layer.parameters(), wanted, strict=True)]
    return float(max(apart)), not layer.weight.grad.is_contiguous()  # type: ignore[union-attr]


def test_gradients_in_another_memory_format_are_averaged_in_place() -> None:
    for apart, still_strided in run_on_ranks(strided, 2):
        assert apart < 1e-6 and still_strided


def of_low_rank(rank: int, transposed: bool) -> float:
    """How far a compressed average in DDP is from a true one of as low a rank, where a parameter may be transposed in
    memory.
    """
    torch.manual_seed(0)
    weight = torch.randn(96, 64).t() if transposed else torch.randn(64, 96)
    layer = nn.Module()
    layer.weight = nn.Parameter(weight)
    layer.forward = lambda inputs: inputs @ layer.weight  # type: ignore[method-assign]
    model = DistributedDataParallel(layer)
    attach(model, LOW_RANK, iterations=10)
    true = torch.randn(64, 8) @ torch.randn(8, 96)
    (model(torch.eye(64)) * true).sum().backward()
    assert weight.is_contiguous() != transposed and layer.weight.grad is not None
    return float((layer.weight.grad - true).norm() / true.norm())


@pytest.mark.parametrize("transposed", [False, True])
def test_a_matrix_is_compressed_as_the_matrix_it_is_however_it_lies_in_memory(transposed: bool) -> None:
    assert max(run_on_ranks(of_low_rank, 2, transposed)) < 1e-5


def sums_in_backward(rank: int) -> tuple[int, int, int, bool]:
    """DDP's buckets in a step without compression, the all-reduces of gradients that start before the end of the
    backward pass, and all of them. Also whether the averages are those of DDP.
    """
    plain = Training(rank, None, **SMALL)
    training = Training(rank, EDGCConfig.of(engine="dense", pp="off"), **SMALL)
    training.train(1)  # DDP cuts its buckets anew after it
    plain.train(1)
    started: list[int] = []
    all_reduce, add, end = dist.all_reduce, edgc.EDGCState.add, edgc.EDGCState.end
    buckets: list[int] = []
    before_end: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda tensor, **how: started.append(1) or all_reduce(tensor, **how))
        patch.setattr(edgc.EDGCState, "add", lambda self, *own: buckets.append(1) or add(self, *own))
        patch.setattr(edgc.EDGCState, "end", lambda self: before_end.append(len(started)) or end(self))
        training.backward()
    plain.backward()
    apart = max(
        float((a - b).abs().max()) for a, b in zip(training.gradients.values(), plain.gradients.values(), strict=True)
    )
    return len(buckets), before_end[0], len(started), apart < 1e-6


def test_a_plain_sum_starts_with_each_bucket_as_ddps_own_does() -> None:
    for buckets, in_backward, all_sums, alike in run_on_ranks(sums_in_backward, 2):
        assert buckets == in_backward == all_sums > MAX_UNITS and alike


def goes_on(rank: int) -> tuple[float, float]:
    """How far averages are from true ones in a step after one without a gradient; of a module with a frozen layer whose
    old gradient is still there.
    """
    layers = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    layers[0].weight.grad = torch.ones(32, 32)
    layers[0].requires_grad_(False)
    settings = EDGCConfig.from_preset(engine="bf16", warmup_fraction=0.0)
    state = edgc.EDGCState(layers, settings, iterations=20, unit_bytes=1)
    found = []
    for step in range(2):
        for index, layer in enumerate(layers[1:]):
            torch.manual_seed(100 * step + 10 * index + rank)
            layer.weight.grad = torch.randn(32, 32) if step or index else None
        if not step:
            with pytest.raises(RuntimeError, match="parameters without a gradient in this step: 1, the first 1.weight"):
                state.step()
            torch.manual_seed(20 + rank)
            assert torch.equal(layers[3].weight.grad, torch.randn(32, 32)), "nothing was summed"
            continue
        true = mean({str(index): layer.weight.grad for index, layer in enumerate(layers[1:])})
        state.step()
        found = [float((layer.weight.grad - true[str(index)]).abs().max()) for index, layer in enumerate(layers[1:])]
    return max(found), float((layers[0].weight.grad - 1).abs().max())


def test_a_step_that_lacked_a_gradient_changes_nothing_and_a_frozen_layer_stays_as_it_was() -> None:
    for apart, frozen in run_on_ranks(goes_on, 2):
        assert apart < 0.02 and frozen == 0


def of_mixed_types(rank: int) -> int:
    """Bytes of a value of the host's sums, of a module in bf16 with a norm in fp32."""
    model = nn.Sequential(nn.Linear(64, 64).bfloat16(), nn.LayerNorm(64))
    return attach(model, BUDGET, iterations=60).run.value_bytes


def test_a_module_is_planned_by_the_type_that_most_of_its_values_have() -> None:
    assert run_on_ranks(of_mixed_types, 2) == [2, 2]


def static_of_two_types(rank: int) -> tuple[list[int], float]:
    """Steps counted after each backward pass of a static graph with two buckets, one for each type, and how far the
    averages are from true ones.

    In the first step DDP numbers both buckets 0, and calls none of them the last.
    """
    faulthandler.dump_traceback_later(60, exit=True)  # a backward pass whose averages never come does not return
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, dtype=torch.bfloat16), nn.Linear(32, 32))
    model[1].register_forward_pre_hook(lambda layer, inputs: inputs[0].bfloat16())
    model[2].register_forward_pre_hook(lambda layer, inputs: inputs[0].float())
    alone = deepcopy(model)
    ddp = DistributedDataParallel(model, static_graph=True)
    state = attach(ddp, EDGCConfig.of(engine="int8", warmup_fraction=0.0), iterations=10)
    counted, apart = [], 0.0
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        inputs = torch.randn(8, 32)
        for one in (ddp, alone):
            one.zero_grad()
            one(inputs).square().sum().backward()
        true = mean({name: p.grad for name, p in alone.named_parameters() if p.grad is not None})
        for name, p in model.named_parameters():
            assert p.grad is not None
            apart = max(apart, float((p.grad - true[name]).abs().max() / true[name].abs().max()))
        counted.append(state.steps)
    faulthandler.cancel_dump_traceback_later()
    return counted, apart


def test_a_static_graph_may_have_several_buckets_in_its_first_step() -> None:
    for counted, apart in run_on_ranks(static_of_two_types, 2):
        assert counted == [1, 2, 3] and apart < 0.05


def drifted(rank: int) -> list[str]:
    """What a step says in which replicas have drifted apart, and the one that a user tries after it."""
    layer = nn.Linear(32, 32)
    state = edgc.EDGCState(layer, EDGCConfig.of(static_rank=4, warmup_fraction=0.0, window=2), iterations=20)
    said = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        for parameter in layer.parameters():
            parameter.grad = torch.randn_like(parameter)
        if step == 1 and rank:
            engine = state.stage.units.of(["weight"])[0].reducer.router.engine
            own = engine.orthonormal
            engine.orthonormal = lambda *arguments, own=own: [basis * (1 + 1e-7) for basis in own(*arguments)]
        try:
            state.step()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_no_step_follows_one_in_which_replicas_have_drifted_apart() -> None:
    for said in run_on_ranks(drifted, 2):
        assert len(said) == 2 and "this EDGC state was closed, or a step of it has failed" in said[1]


def closed(rank: int) -> tuple[int, int]:
    """Windows that the controller has seen before and after the end of a run that was cut short."""
    training = Training(rank, LOW_RANK)
    assert training.state is not None
    training.train(2 * LOW_RANK.ranks.window)
    state = training.state
    before = 0 if state.windows.controller is None else len(state.windows.controller.entropy.history)
    state.close()
    return before, 0 if state.windows.controller is None else len(state.windows.controller.entropy.history)


def ignores(rank: int) -> tuple[bool, bool]:
    """Whether a gradient that DDP leaves alone stays as it was, and whether another one is averaged."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    ddp = DistributedDataParallel(model)
    state = attach(ddp, "balanced", iterations=10)
    torch.manual_seed(rank)
    ddp(torch.randn(8, 16)).square().sum().backward()
    gradients = [layer.weight.grad for layer in model]
    digests = [torch.zeros(2).scatter_(0, torch.tensor(rank), gradient.norm()) for gradient in gradients]
    for one in digests:
        dist.all_reduce(one)
    state.close()
    return bool(digests[1][0] != digests[1][1]), bool(digests[0][0] == digests[0][1])


def test_parameters_that_ddp_ignores_are_left_alone() -> None:
    assert run_on_ranks(ignores, 2) == [(True, True)] * 2


def test_the_end_of_a_run_right_after_a_window_decides_nothing() -> None:
    (before, after), _ = run_on_ranks(closed, 2)
    assert before == after > 0


# seconds that a reduction takes, by whether it compresses
SLOW_COMPRESSION, SLOW_HOST = {True: 0.25, False: 0.01}, {True: 0.01, False: 0.4}
NEW_LINK, STEPS_OF_RUN = 48, 100  # the step from which on the delays are others
TRIED = BUDGET.replace(link_gbps=None)


@contextmanager
def made_up_times(taken: Callable[[Router], float]) -> Iterator[Callable[[], None]]:
    """The clocks of the steps and of their reductions say what ``taken`` does, in seconds, of a reduction's router; a
    step takes 0.1 s besides. What this yields is called after each step.
    """
    reduce, sum_buffer, clock, reduction = GradientReducer.reduce, edgc.EDGCState._sum_buffer, [0.0], [0.0]

    def timed(self: GradientReducer, *args: Any, **kwargs: Any) -> Any:
        reduction[0] = taken(self.router)
        yield from reduce(self, *args, **kwargs)

    def timed_sum(self: edgc.EDGCState, *args: Any) -> None:
        reduction[0] = taken(self.stage.reducers[0].router)
        sum_buffer(self, *args)

    def step_ends() -> None:
        clock[0] += 0.1 + reduction[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientReducer, "reduce", timed)
        patch.setattr(edgc.EDGCState, "_sum_buffer", timed_sum)
        patch.setattr(Spans, "take_seconds", lambda self: list(reduction))
        patch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
        yield step_ends


DOUBT, NONE_PAYS = (StageCost(LinearCost(intercept, 1e-9), 1e-4, 1e-4) for intercept in (0.0, 1.0))  # of any rank


def try_steps(rank: int, cost: StageCost, first: dict[bool, float], then: dict[bool, float], folder: str) -> float:
    """A run that decides by its steps who sums; the most that is lost in a step. ``cost``: as probed."""

    def taken(router: Router) -> float:
        return (first if training.step_number < NEW_LINK else then)[router.compressed]

    with made_up_times(taken) as step_ends, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "reduction_cost", lambda *_: cost)
        patch.setattr(trials, "LARGEST_SHARE_OF_RUN", 0.1)  # half a percent of so short a run is no step at all
        training, alone = Training(rank, TRIED.replace(log_dir=folder), iterations=STEPS_OF_RUN), net()
        most, by_host = 0.0, 0
        for step in range(STEPS_OF_RUN):
            most = max(most, lost_in_step(training, alone))
            training.optimizer.step()
            step_ends()
            assert training.state is not None
            if training.state.stage.reducers[0].router.unrounded:
                by_host += 1
                assert not any(error.any() for error in training.errors().values()), "the host's sum leaves no error"
            if step == NEW_LINK - 1:
                other = edgc.EDGCState(alone, TRIED, iterations=STEPS_OF_RUN)
                other.load_state_dict(training.state.state_dict())
                assert other.driver.plan.by_host == training.state.driver.plan.by_host
                assert other.plan.tries and other.windows.controller is not None or rank > 0
        assert by_host > 0
    return most


def who_sums(folder: Path) -> dict[int, bool]:
    """Whether the host does from an iteration on."""
    return {e["iteration"]: e["plan"]["by_host"] for e in read_events(folder) if e["event"] == "window"}


@pytest.mark.parametrize(
    ("cost", "first", "then", "before", "after"),
    [
        pytest.param(DOUBT, SLOW_HOST, SLOW_HOST, False, False, id="compression is faster"),
        pytest.param(DOUBT, SLOW_COMPRESSION, SLOW_HOST, True, False, id="compression is slower, then the link"),
        pytest.param(NONE_PAYS, SLOW_COMPRESSION, SLOW_HOST, True, False, id="dense by the probe, then a slow link"),
    ],
)
def test_the_steps_of_a_run_decide_who_sums(
    cost: StageCost, first: dict[bool, float], then: dict[bool, float], before: bool, after: bool, tmp_path: Path
) -> None:
    most = run_on_ranks(try_steps, 2, cost, first, then, str(tmp_path))[0]
    assert most < 1e-4
    found = who_sums(tmp_path)
    middle, end = found[NEW_LINK], found[STEPS_OF_RUN]
    assert (middle, end) == (before, after), found
    tried = [e["plan"]["tried"] for e in read_events(tmp_path) if e["event"] == "window"]
    assert len(tried[-1]) == 2, "the log says what was measured"


# on a link on which rank 8 takes 0.15 s
ROUNDING_PAYS = StageCost(LinearCost(0.11, 0.005), 0.5, 0.5, rounded_seconds=0.1, volume_rank=8)


def follow_link(rank: int, folder: str) -> tuple[float, list[bool], list[bool]]:
    """A run that rounds, whose link becomes slow: the most that is lost in a step, and whether all is rounded and low
    rank is used from step to step.
    """

    def taken(router: Router) -> float:
        low_rank, rounded, host = (0.05, 0.05, 0.2) if training.step_number < NEW_LINK else (0.15, 0.3, 0.8)
        way = low_rank if router.ranks else rounded
        return way if router.compressed else host

    with made_up_times(taken) as step_ends, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "reduction_cost", lambda *_: ROUNDING_PAYS)
        training, alone = Training(rank, TRIED.replace(log_dir=folder, volume=16.0), iterations=STEPS_OF_RUN), net()
        most, rounded, in_low_rank = 0.0, [], []
        for _ in range(STEPS_OF_RUN):
            most = max(most, lost_in_step(training, alone))
            training.optimizer.step()
            step_ends()
            assert training.state is not None
            reducers = training.state.stage.reducers
            rounded.append(all(one.router.compressed and not one.router.ranks for one in reducers))
            in_low_rank.append(any(one.router.compressed and bool(one.router.ranks) for one in reducers))
    return most, rounded, in_low_rank


def test_a_run_that_rounds_sends_low_rank_once_its_link_is_slow(tmp_path: Path) -> None:
    for most, rounded, in_low_rank in run_on_ranks(follow_link, 2, str(tmp_path)):
        assert most < 1e-4
        assert all(rounded[12:NEW_LINK]) and not any(in_low_rank[:NEW_LINK])
        assert sum(in_low_rank[NEW_LINK + 4 :]) >= STEPS_OF_RUN - NEW_LINK - 4 - trials.TRIAL_STEPS
    reasons = {e["iteration"]: e["plan"]["reasons"] for e in read_events(tmp_path) if e["event"] == "window"}
    assert reasons[NEW_LINK] == ["rounding is faster"] != reasons[STEPS_OF_RUN]


ROUNDING_IS_FASTER = StageCost(LinearCost(0.1, 0.1), 1.0, 1.0, rounded_seconds=0.1, volume_rank=40)


def rounds(rank: int, folder: str) -> dict[str, Any]:
    """A run that rounds by its probe, one that goes on from it on another link, and one with a rank asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "reduction_cost", lambda *_: ROUNDING_IS_FASTER)
        before, alone = Training(rank, TRIED.replace(log_dir=folder), iterations=40), net()
        most = 0.0
        for _ in range(12):
            most = max(most, lost_in_step(before, alone))
            before.optimizer.step()
        assert before.state is not None
        state = before.state.state_dict()
        before.state.close()
    found = {}
    for name, config, cost in (("same", TRIED, NONE_PAYS), ("asked", TRIED.replace(rmax=8), ROUNDING_IS_FASTER)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "reduction_cost", lambda *_, cost=cost: cost)
            after = Training(rank, config, iterations=40)
            assert after.state is not None
            after.state.load_state_dict(state)
            after.train(12)
            found[name] = (
                set(after.state.driver.plan.formats[0] or {}),
                len(after.state.driver.plan.matrix_ranks[0] or {}),
            )
    return {"lost": most, "parameters": set(before.parameters), **found}


def test_a_run_that_rounds_loses_nothing_and_goes_on_so_until_a_rank_is_asked_for(tmp_path: Path) -> None:
    for found in run_on_ranks(rounds, 2, str(tmp_path)):
        assert found["lost"] < 1e-4
        assert found["same"] == (found["parameters"], 0)
        assert found["asked"][1] > 0
    windows = {event["iteration"]: event for event in read_events(tmp_path) if event["event"] == "window"}
    first, then = windows[4], windows[8]  # before the host's own sum is tried
    assert then["plan"]["reasons"] == ["rounding is faster"]
    ratio = (then["dp_bytes_dense"] - first["dp_bytes_dense"]) / (then["dp_bytes"] - first["dp_bytes"])
    assert 7 < ratio < 8, "4 bits, and samples"
