"""A save that a signal asks for must not end because the signal has ended the helper process of Megatron's writer."""

import multiprocessing
import os
import signal
import time
from argparse import Namespace
from multiprocessing import forkserver

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron.edgc.checkpoint.hooks import shield_writer


def test_the_server_that_forks_asynchronous_writers_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    server = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "ensure_running", server.ensure_running)
    arguments = Namespace(
        exit_signal_handler=True, exit_signal=signal.SIGTERM, save="here", ckpt_format="torch_dist", async_save=True
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
