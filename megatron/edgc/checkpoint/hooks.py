"""When EDGC's state is saved and loaded: whenever Megatron saves or loads a checkpoint, as an entry of its state dict.

So Megatron writes it with everything else, asynchronously if asked to, into every kind of checkpoint it knows, declares
a checkpoint complete only with it, and removes it with the rest. Plain Megatron does not ask for the entry.

``saving.py`` makes the entry, ``index.py`` describes it, and ``loading.py`` restores it.
"""

import os
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from multiprocessing import forkserver
from typing import Any

from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue
from megatron.training import checkpointing as megatron_checkpointing
from megatron.training import training as megatron_training
from megatron.training.checkpointing import CheckpointType
from torch import nn

from edgc.comm.objects import all_gather_objects
from edgc.config import ConfigError
from edgc.printing import print_warning
from megatron.edgc.checkpoint.index import RunState
from megatron.edgc.checkpoint.keys import ENTRY
from megatron.edgc.checkpoint.loading import GO_ON, resumed
from megatron.edgc.checkpoint.saving import CheckpointSaver
from megatron.edgc.seam import Seam


def shield_writer(args: Namespace) -> None:
    """Start the helpers of Megatron's ``torch_dist`` writer so that they outlive ``--exit-signal-handler``'s signal.

    Slurm and torchrun send the signal to all processes. The helpers would end by it, and with them the save that the
    signal asks for; started while the signal is ignored, they ignore it. With ``--async-save`` the writer itself is a
    helper: the server that forks it passes on what it ignores. That of ``--async-strategy nvrx``, Megatron's default
    where nvidia-resiliency-ext is installed, cannot be kept from ending: a warning says so.
    """
    if args.exit_signal_handler and args.save is not None and args.ckpt_format == "torch_dist":
        strategy = getattr(args, "async_strategy", "nvrx")
        if args.async_save and strategy == "nvrx" and find_spec("nvidia_resiliency_ext") and args.rank == 0:
            print_warning(
                "the writer of --async-save ends by the signal of --exit-signal-handler if all processes get it, as "
                "from Slurm and torchrun, and with it the last checkpoint: --async-strategy mcore keeps it alive"
            )
        before = signal.signal(args.exit_signal, signal.SIG_IGN)
        get_write_results_queue()
        if args.async_save:
            forkserver.ensure_running()
        signal.signal(args.exit_signal, before)


class CheckpointHooks:
    """The methods that run around Megatron's functions once ``install`` has been called.

    Each gets Megatron's function first and then its arguments. ``chunks`` are those of the model whose gradients EDGC
    reduces: another one, such as a teacher, is saved and loaded without EDGC's state. ``on_loaded`` is called after a
    load, with the iterations that the checkpoint's run has behind it.
    """

    def __init__(
        self,
        run: RunState,
        chunks: Sequence[nn.Module],
        saver: CheckpointSaver,
        on_loaded: Callable[[int], None],
    ):
        self.run, self.saver, self.on_loaded = run, saver, on_loaded
        self._parameters = {parameter for chunk in chunks for parameter in chunk.parameters()}
        self._other_model = False  # whether the save or load under way is of another model
        self._entry: dict[str, Any] | None = None  # of the save under way
        self._found: tuple[Any, ...] | None = None  # what Megatron has read first of the checkpoint to load

    def install(self, seam: Seam) -> None:
        """Take the place of what Megatron saves and loads with."""
        methods: dict[str, Callable[..., Any]] = {"save_checkpoint": self.save, "load_checkpoint": self.load}
        methods |= {"generate_state_dict": self.generate, "_load_base_checkpoint": self.read}
        for name, method in methods.items():
            for module in (megatron_checkpointing, megatron_training):  # the second has what Megatron's own loop calls
                if hasattr(module, name):
                    seam.replace(module, name, partial(method, getattr(module, name)))

    def save(self, save_checkpoint: Callable[..., Any], iteration: int, model: Any, *args: Any, **kwargs: Any) -> Any:
        """A save begins: make the entry. It takes collectives, and with the format ``torch`` not every process
        generates a state dict.
        """
        local = bool(kwargs.get("non_persistent_ckpt")) and self.run.args.non_persistent_ckpt_type == "local"
        with self._handling(model):
            if not self._other_model:
                self._entry = self.saver.entry(iteration, local)
            try:
                return save_checkpoint(iteration, model, *args, **kwargs)
            finally:
                self._entry = None

    def load(self, load_checkpoint: Callable[..., Any], ddp_model: Any, *args: Any, **kwargs: Any) -> Any:
        """A load begins: ``read`` must know of which model."""
        with self._handling(ddp_model):
            return load_checkpoint(ddp_model, *args, **kwargs)

    @contextmanager
    def _handling(self, model: Any) -> Iterator[None]:
        """Within this context a model, or a list of its chunks, is saved or loaded. It may be wrapped in anything."""
        chunks: list[nn.Module] = model if isinstance(model, list) else [model]
        self._other_model = not any(one in self._parameters for chunk in chunks for one in chunk.parameters())
        try:
            yield
        finally:
            self._other_model = False

    def generate(self, generate_state_dict: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Megatron makes a state dict, for a save or for a load. Raises ``ConfigError`` for a save without entry."""
        state_dict = generate_state_dict(*args, **kwargs)
        if self._other_model:
            return state_dict
        if self._entry is not None:
            state_dict[ENTRY] = self._entry
        elif kwargs.get("iteration") is not None:  # a load asks for none
            # With the format torch only some processes come here. The others wait until the launcher ends them.
            raise ConfigError(
                "this checkpoint would be without EDGC's state: save_checkpoint was imported before EDGC was "
                "attached. Call megatron.training.checkpointing.save_checkpoint by this name"
            )
        return state_dict

    def read(
        self,
        load_base_checkpoint: Callable[..., Any],
        load_dir: Any,
        args: Namespace,
        rank0: bool = False,
        sharded_state_dict: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Megatron reads a checkpoint, in some formats twice.

        First, with ``rank0``, it reads what is the same for all processes. Then it gives a ``sharded_state_dict`` of
        what it wants, to which the state that this run can use is added. In the format ``torch`` it reads the whole
        file at once. Raises ``ConfigError``, on all processes alike, for state that does not fit.
        """
        if rank0 or self._other_model:
            found = load_base_checkpoint(load_dir, args, rank0=rank0, sharded_state_dict=sharded_state_dict, **kwargs)
            if not self._other_model:
                self._found = found
            return found
        first, self._found = self._found, None
        sharded, resume = sharded_state_dict is not None, None
        if sharded and first is not None and _goes_on(first, args):
            resume = _on_all_processes(lambda: resumed(first[0].get(ENTRY), self.run, _folder(first)))
            if resume is not None:
                sharded_state_dict[ENTRY] = {"state": resume.requests()}
        found = load_base_checkpoint(load_dir, args, rank0=False, sharded_state_dict=sharded_state_dict, **kwargs)
        if not _goes_on(found, args):
            return found
        entry = found[0].pop(ENTRY, None)
        if not sharded:
            resume = _on_all_processes(lambda: resumed(entry, self.run, _folder(found)))
        if resume is not None:
            # Megatron leaves out a dict that is empty, as that of a process without errors is at another size
            dropped = _on_all_processes(lambda: resume.load(entry.get("state", {})))
            resume.warn_of_losses(messages=any(all_gather_objects(dropped)))
        self.on_loaded(found[0].get("iteration", 0))
        return found


def _goes_on(found: tuple[Any, ...], args: Namespace) -> bool:
    """Whether a run is to go on from what Megatron's ``_load_base_checkpoint`` has returned."""
    state_dict, _, release, _ = found
    return not (state_dict is None or release or args.finetune)


def _folder(found: tuple[Any, ...]) -> str:
    """The folder of the checkpoint that Megatron's ``_load_base_checkpoint`` has found."""
    _, name, _, kind = found
    return os.path.dirname(os.path.dirname(name)) if kind is CheckpointType.LEGACY else str(name)


def _on_all_processes[T](work: Callable[[], T]) -> T:
    """Raise on every process what one of them raises: the others would wait for it."""
    message, result = None, None
    try:
        result = work()
    except ConfigError as error:
        message = str(error)
    except Exception as error:  # whatever a state that is not what it should be leads to
        message = f"the EDGC state cannot be read ({type(error).__name__}: {error}); {GO_ON}"
    for found in all_gather_objects(message):
        if found is not None:
            raise ConfigError(found)
    return result  # type: ignore[return-value]  # there was no exception
