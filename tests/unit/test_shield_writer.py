"""A save that a signal asks for must not end because the signal has ended the helper process of Megatron's writer."""

import multiprocessing
import os
import signal
import time
from argparse import Namespace

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron.edgc.checkpointing import shield_writer


@pytest.mark.parametrize("handler", [False, True])
def test_the_helper_outlives_the_signal_that_is_handled(handler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    others = set(multiprocessing.active_children())
    before = signal.getsignal(signal.SIGTERM)
    arguments = Namespace(
        exit_signal_handler=handler, exit_signal=signal.SIGTERM, save="here", ckpt_format="torch_dist"
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
