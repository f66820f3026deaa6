"""A save that a signal asks for must not end because the signal has ended the helper process of Megatron's writer."""

import multiprocessing
import os
import signal
import time
from argparse import Namespace
from multiprocessing import forkserver

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron.edgc.checkpoint import hooks
from megatron.edgc.checkpoint.hooks import shield_writer


def test_the_server_that_forks_asynchronous_writers_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    server = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "ensure_running", server.ensure_running)
    arguments = Namespace(
        exit_signal_handler=True,
        exit_signal=signal.SIGTERM,
        save="here",
        ckpt_format="torch_dist",
        async_save=True,
        rank=0,
    )
    others = set(multiprocessing.active_children())
    shield_writer(arguments)
    pid = server._forkserver_pid  # type: ignore[attr-defined]
    try:
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)  # it runs
    finally:
        os.kill(pid, signal.SIGKILL)
        for helper in set(multiprocessing.active_children()) - others:
            helper.kill()


@pytest.mark.parametrize(
    ("installed", "strategy", "warned"), [(True, "nvrx", True), (True, "mcore", False), (False, "nvrx", False)]
)
def test_a_writer_that_cannot_be_kept_alive_is_named(
    installed: bool, strategy: str, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hooks, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(hooks, "get_write_results_queue", lambda: None)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: None)
    of_signal = {"exit_signal_handler": True, "exit_signal": signal.SIGTERM, "rank": 0}
    shield_writer(
        Namespace(save="here", ckpt_format="torch_dist", async_save=True, async_strategy=strategy, **of_signal)
    )
    assert ("--async-strategy mcore keeps it alive" in capsys.readouterr().err) == warned


@pytest.mark.parametrize("handler", [False, True])
def test_the_helper_outlives_the_signal_that_is_handled(handler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    others = set(multiprocessing.active_children())
    before = signal.getsignal(signal.SIGTERM)
    arguments = Namespace(
        exit_signal_handler=handler,
        exit_signal=signal.SIGTERM,
        save="here",
        ckpt_format="torch_dist",
        async_save=False,
    )
    shield_writer(arguments)
    assert signal.getsignal(signal.SIGTERM) is before
    queue = filesystem_async.get_write_results_queue()
    (helper,) = set(multiprocessing.active_children()) - others
    os.kill(helper.pid, signal.SIGTERM)
    time.sleep(0.5)
    assert helper.is_alive() == handler  # without the shield it ends
    if handler:
        queue.put("written")
        assert queue.get() == "written"
    helper.kill()
    helper.join()
