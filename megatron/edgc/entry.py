"""EDGC in a training script on Megatron-core, this project's own or another one."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.training import get_args
from megatron.training import training as megatron_training
from torch import nn

from edgc.config import ConfigError, EDGCConfig
from edgc.printing import print_warning
from megatron.edgc.arguments import config_from_args
from megatron.edgc.checkpoint.hooks import shield_writer
from megatron.edgc.session import Session


def attach(chunks: list[nn.Module], config: EDGCConfig | None = None) -> Session:
    """Let EDGC reduce the gradients of model chunks that Megatron's DDP has wrapped. For training loops that call
    Megatron's parts themselves; ``compressing`` is for those that call ``pretrain``.

    ``config``: by default that of the ``--edgc`` flags. Every process calls this at the same point, after Megatron's
    arguments are set and before the optimizer is built and a checkpoint loaded. The step under way is
    ``args.curr_iteration``. Raises ``ConfigError`` for what EDGC cannot take, and without ``--edgc`` or a config.
    """
    config = config or config_from_args(get_args())
    if config is None:
        raise ConfigError("EDGC has no settings: add --edgc, or give a config")
    session = Session(config, get_args())
    try:
        session.install(chunks)
    except BaseException:
        session.close()
        raise
    return session


@contextmanager
def compressing(args: Namespace, model: Any = None, config: EDGCConfig | None = None) -> Iterator[Session | None]:
    """What Megatron's ``pretrain`` trains within this context, EDGC reduces the gradients of.

    ``args``: Megatron's, validated, with the ``--edgc`` flags. Without ``--edgc`` and without a ``config``, and with
    ``--skip-train``, Megatron goes on as it is, and the context's value is None. ``model``: the ``ModelConfig`` from
    which ``pretrain`` builds its model; None where it gets a ``model_provider``. Raises ``ConfigError`` for what EDGC
    cannot take.
    """
    config = config or config_from_args(args)
    if config is not None and args.skip_train:
        if args.rank == 0:
            print_warning("with --skip-train nothing is reduced: EDGC does nothing")
        config = None
    if config is None:
        yield None
        return
    session = Session(config, args)
    shield_writer(args)
    with session.seam:
        if model is not None:
            session.seam.add(model.post_wrap_hooks, session.install)
        else:
            _install_on_built_models(session)
        _check_installed(session)
        try:
            yield session
        except SystemExit as ended:  # how Megatron ends a run after --exit-interval, a time limit, or a signal
            if not ended.code:
                session.close()
            raise
        session.close()  # if --iterations-to-skip has left out the last one


def _check_installed(session: Session) -> None:
    """Check, once Megatron has built its model, that EDGC knows it: else it would train as without EDGC."""

    def set_up_with_edgc(*args: Any, **kwargs: Any) -> Any:
        found = set_up(*args, **kwargs)
        if not session.installed:
            raise ConfigError(
                "EDGC was given no model: call compressing(args, MODEL_CONFIG) where pretrain builds the model from "
                "MODEL_CONFIG, and compressing(args) where it gets a model_provider"
            )
        return found

    set_up = session.seam.replace(megatron_training, "setup_model_and_optimizer", set_up_with_edgc)


def _install_on_built_models(session: Session) -> None:
    """Install EDGC on models that a ``model_provider`` makes, which Megatron builds and wraps in one function."""

    def get_model_with_edgc(*args: Any, **kwargs: Any) -> Any:
        chunks = get_model(*args, **kwargs)
        # a model that is not trained, as for inference in reinforcement learning
        wrapped = args[2] if len(args) > 2 else kwargs.get("wrap_with_ddp", True)
        return session.install(chunks) if wrapped else chunks

    get_model = session.seam.replace(megatron_training, "get_model", get_model_with_edgc)
