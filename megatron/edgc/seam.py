"""The seam to Megatron: which of its functions EDGC relies on, and the one way in which a run replaces some of them.

    python -m megatron.edgc.seam [FOLDER]

prints for every row of ``RELIED_ON`` whether the installed Megatron-core agrees, or the one whose ``core`` and
``training`` are in FOLDER, with the hashes that it has. So a new row is added without hashes, and the command prints
the one to write down.
"""

import ast
import hashlib
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, ClassVar

from edgc.config import ConfigError


@dataclass(frozen=True)
class Dependency:
    """A function or class that EDGC replaces, overrides, calls although it is private, or finds attributes through.

    ``hashes`` are those of the sources that were read and found to fit, oldest first (``source_hash``). Where the whole
    source does not matter, ``names`` are what it must contain.
    """

    file: str  # in the folder of core and training
    name: str  # qualified; empty for the module
    why: str
    hashes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


_BUCKETS = "core/distributed/param_and_grad_buffer.py"
_MESSAGES = "core/pipeline_parallel/p2p_communication.py"
_SCHEDULES = "core/pipeline_parallel/schedules.py"

# Hashes without a comment are of 0.19.0 to 0.19.2, whose sources agree.
RELIED_ON = (
    # replaced for the run
    Dependency(
        "core/distributed/finalize_model_grads.py",
        "_allreduce_word_embedding_grads",
        "replaced: the two copies of a tied embedding are summed at once",
        ("43383948269d",),
    ),
    Dependency(
        "core/distributed/finalize_model_grads.py",
        "finalize_model_grads",
        "calls the sum of the two copies, which is replaced",
        names=("_allreduce_word_embedding_grads",),
    ),
    Dependency(
        _SCHEDULES,
        "forward_backward_pipelining_without_interleaving",
        "P2PCommunicator is replaced where it is built",
        names=("P2PCommunicator", "finalize_model_grads_func"),
    ),
    Dependency(
        _SCHEDULES,
        "forward_backward_pipelining_with_interleaving",
        "P2PCommunicator is replaced where it is built",
        names=("P2PCommunicator", "finalize_model_grads_func"),
    ),
    Dependency(
        "training/training.py",
        "",
        "save_checkpoint and load_checkpoint are replaced in its names; the step under way is args.curr_iteration",
        names=("save_checkpoint", "load_checkpoint", "finalize_model_grads_func", "curr_iteration"),
    ),
    Dependency(
        "training/training.py",
        "train",
        "train_step is replaced where it is called: what it returns begins with the losses",
        names=("train_step", "loss_dict"),
    ),
    Dependency(
        "training/training.py",
        "setup_model_and_optimizer",
        "get_model is replaced where it is called: EDGC is installed on the model of a model_provider; after it EDGC "
        "must be installed",
        names=("get_model",),
    ),
    Dependency(
        "training/checkpointing.py",
        "save_checkpoint",
        "its replacement reads these arguments; generate_state_dict is replaced; what writes the format torch",
        names=("iteration", "model", "non_persistent_ckpt", "generate_state_dict", "dp_rank", "expt_dp_rank"),
    ),
    Dependency(
        "training/checkpointing.py",
        "load_checkpoint",
        "its replacement reads this argument; _load_base_checkpoint is replaced",
        names=("ddp_model", "_load_base_checkpoint"),
    ),
    Dependency(
        "training/checkpointing.py",
        "_load_base_checkpoint",
        "its replacement reads these arguments and what it returns",
        names=("load_dir", "rank0", "sharded_state_dict", "state_dict", "checkpoint_name", "release", "ckpt_type"),
    ),
    Dependency("training/models/base.py", "ModelConfig", "EDGC is installed by a hook", names=("post_wrap_hooks",)),
    # overridden in a subclass
    Dependency(
        _BUCKETS,
        "_ParamAndGradBucketGroup.start_grad_sync",
        "overridden: its checks and its scaling are done here as well",
        ("43e3635dd82b",),
    ),
    Dependency(
        _BUCKETS,
        "_ParamAndGradBucketGroup.start_param_sync",
        "overridden: its flags are set here as well",
        ("58ba56f49a21",),
    ),
    Dependency(
        _MESSAGES,
        "P2PCommunicator._communicate",
        "overridden: its order of sending and receiving is kept",
        ("ba26e0702fd9",),
    ),
    # their counterparts, which stay Megatron's
    Dependency(
        _BUCKETS,
        "_ParamAndGradBucketGroup.finish_grad_sync",
        "waits for a handle of EDGC's",
        ("d3f0d94e7d32",),
    ),
    Dependency(
        _BUCKETS,
        "_ParamAndGradBucketGroup.finish_param_sync",
        "waits for a handle of EDGC's",
        ("e41433c7b424",),
    ),
    # called
    Dependency(
        _BUCKETS,
        "_ParamAndGradBucketGroup._post_param_sync",
        "called after weights have been gathered",
        # the second: main of August 2026, to be 0.20, which casts the quantised parameters of a bucket in one call
        ("3eeb90c7271c", "15a89a07de6e"),
    ),
    Dependency(
        _BUCKETS, "_ParamAndGradBucketGroup.check_grads", "called before gradients are scaled", ("bd71fffab897",)
    ),
    Dependency(_BUCKETS, "shard_buffer", "called: says which part of a buffer is whose", ("7a8b8f5279e0",)),
    Dependency(_MESSAGES, "_batched_p2p_ops", "called with messages in the place of tensors", ("ceda7c5bc430",)),
    Dependency(_MESSAGES, "_p2p_ops", "called with messages in the place of tensors", ("d75eff74d927",)),
    Dependency(
        "training/training.py",
        "update_train_iters",
        "called with a copy of the arguments: counts the iterations of the run",
        names=("train_iters",),
    ),
    Dependency(_SCHEDULES, "get_schedule_table", "called: says which model chunk a message is from", ("f5cf9e7d2042",)),
    # their attributes are used
    Dependency(
        _BUCKETS,
        "_ParamAndGradBucket.__init__",
        "these attributes are read",
        names=("grad_data", "param_data", "param_to_index", "gradient_scaling_factor", "params_list"),
    ),
    Dependency(
        _BUCKETS,
        "_ParamAndGradBucketGroup.__init__",
        "these attributes are read, and handles are set",
        names=(
            *("buckets", "ddp_config", "data_parallel_group", "intra_distributed_optimizer_instance_group"),
            *("is_first_batch", "grad_reduce_handle", "param_gather_handle", "param_gather_dispatched"),
        ),
    ),
    Dependency(
        "core/distributed/distributed_data_parallel.py",
        "DistributedDataParallel.__init__",
        "these attributes are read",
        names=("bucket_groups", "expert_parallel_bucket_groups"),
    ),
    Dependency(
        _MESSAGES,
        "P2PCommunicator.__init__",
        "these attributes are read",
        names=("pp_group", "config", "prev_rank", "next_rank"),
    ),
)


class Seam:
    """What one training run replaces in Megatron. A context manager: on leaving, also by an exception, it restores
    everything in reverse order.

    One run at a time replaces functions of Megatron's modules. Objects that Megatron builds for the run, such as bucket
    groups, end with the run and are not restored. Nor are the redirections of ``cpu.redirect``, which are made once for
    the process.
    """

    _holder: ClassVar["Seam | None"] = None  # whose functions are in the place of Megatron's

    def __init__(self) -> None:
        self._restore = ExitStack()

    def __enter__(self) -> "Seam":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Restore everything that was replaced."""
        self._restore.close()

    def replace(self, owner: Any, attribute: str, replacement: Any) -> Any:
        """Set an attribute of a module, a class or an object; return what was there.

        Raises ``AttributeError`` if the owner has no such attribute, and ``ConfigError`` while another run has replaced
        functions of modules.
        """
        found = getattr(owner, attribute)
        if isinstance(owner, ModuleType):
            self.hold()
        if attribute in vars(owner):  # not getattr's answer: of a static method that would be the bare function
            self._restore.callback(setattr, owner, attribute, vars(owner)[attribute])
        else:
            self._restore.callback(delattr, owner, attribute)
        setattr(owner, attribute, replacement)
        return found

    def hold(self) -> None:
        """Be the one that may replace functions of Megatron's modules, until ``close``.

        Raises ``ConfigError`` while another run is.
        """
        if Seam._holder is None:
            Seam._holder = self
            self._restore.callback(setattr, Seam, "_holder", None)
        elif Seam._holder is not self:
            raise ConfigError("EDGC is attached to another model of this process: close its session first")

    def add(self, hooks: list[Any], hook: Any) -> None:
        """Append to a list of Megatron's."""
        hooks.append(hook)
        self._restore.callback(hooks.remove, hook)


def megatron_folder() -> Path:
    """The folder of ``core`` and ``training`` of the installed Megatron-core. Imports neither.

    Raises ``ConfigError`` if it is not installed.
    """
    core = find_spec("megatron.core")
    if core is None or core.origin is None:
        raise ConfigError("megatron-core is not installed: install EDGC with its extra 'megatron' (docs/install.md)")
    return Path(core.origin).parents[1]


def changes(folder: Path) -> list[str]:
    """What of ``RELIED_ON`` is otherwise in the Megatron whose ``core`` and ``training`` are in this folder.

    Reads files, and imports nothing: a name that is gone would fail the import of whatever needs it.
    """
    return [said for row, (said, _) in zip(RELIED_ON, _compare(folder), strict=True) if said]


def _compare(folder: Path) -> list[tuple[str, str]]:
    """What has changed in each row, empty if nothing has, and the hash."""
    modules: dict[str, ast.Module] = {}
    compared = []
    for row in RELIED_ON:
        path = folder / row.file
        if row.file not in modules:
            modules[row.file] = ast.parse(path.read_text() if path.is_file() else "")
        node = _find(modules[row.file], row.name)
        definition = f"{row.name or 'the module'} in {row.file}"
        if node is None:
            compared.append((f"{definition} is gone ({row.why})", ""))
        elif row.names:
            missing = set(row.names) - _names(node)
            compared.append((f"{definition} has no {', '.join(sorted(missing))} ({row.why})" if missing else "", ""))
        else:
            found = source_hash(node)
            compared.append(("" if found in row.hashes else f"{definition} has another body ({row.why})", found))
    return compared


def source_hash(node: ast.AST) -> str:
    """The hash of what a definition does, without comments, layout, docstrings and annotations. It is the same on every
    Python that parses the definition to the same tree.
    """
    return hashlib.sha256(repr(_shape(node)).encode()).hexdigest()[:12]


def _shape(node: Any) -> Any:
    if isinstance(node, list):
        return [_shape(one) for one in node if not _is_text(one)]
    if not isinstance(node, ast.AST):
        return node
    # empty fields are left out: every version of Python adds some
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    return type(node).__name__, [
        (name, _shape(value)) for name, value in fields if name not in ("annotation", "returns", "type_comment")
    ]


def _is_text(node: Any) -> bool:
    """Whether a statement is a docstring, or another string that nothing is done with."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _find(node: Any, name: str) -> Any:
    """The definition of this qualified name; None if there is none."""
    for part in name.split(".") if name else ():
        node = next((child for child in getattr(node, "body", ()) if getattr(child, "name", None) == part), None)
    return node


def _names(node: ast.AST) -> set[str]:
    """All names in the source: of variables, attributes, parameters and imports."""
    kinds = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.alias: "name"}
    return {getattr(one, kinds[type(one)]) for one in ast.walk(node) if type(one) in kinds}


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else megatron_folder()
    compared = _compare(folder)
    for row, (said, found) in zip(RELIED_ON, compared, strict=True):
        print(f"{'CHANGED' if said else 'agrees':8}{found:13}{said or f'{row.name or "module"} in {row.file}'}")
    return int(any(said for said, _ in compared))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
