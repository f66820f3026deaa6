"""Megatron's communicator between pipeline stages, with its own way to send and receive a tensor."""

from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _batched_p2p_ops, _p2p_ops
from torch import Tensor

from megatron.edgc.messages.pipeline_messages import Incoming, PipelineMessages
from megatron.edgc.seam import Seam


def install(messages: PipelineMessages, seam: Seam) -> None:
    """Let Megatron's schedules build ``EDGCP2PCommunicator`` in the place of their own.

    They take one as an argument, too, but only together with process groups, before those exist. They build one for
    each step, and for each step of an evaluation.
    """

    def build(pp_group: Any, config: Any) -> EDGCP2PCommunicator:
        if messages.training:
            messages.begin()
        return EDGCP2PCommunicator(pp_group, config, messages)

    seam.replace(schedules, "P2PCommunicator", build)


class _Receive:
    """Megatron waits on this as on the request itself; then the tensor holds the message."""

    def __init__(self, request: Any, incoming: Incoming):
        self.request, self.incoming = request, incoming

    def wait(self) -> None:
        self.request.wait()
        self.incoming.finish()


class EDGCP2PCommunicator(P2PCommunicator):  # type: ignore[misc]
    """Megatron's communicator, whose messages may travel compressed."""

    def __init__(self, pp_group: Any, config: Any, messages: PipelineMessages):
        super().__init__(pp_group, config)
        self.messages = messages

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        """Megatron's function, for messages whose shapes differ from those of their tensors, in each direction."""
        messages, config = self.messages, self.config
        send_next, send_prev = tensor_send_next, tensor_send_prev
        if messages.training:
            send_next = None if send_next is None else messages.outgoing("forward", send_next)
            send_prev = None if send_prev is None else messages.outgoing("backward", send_prev)
        if not messages.training or not messages.directions:
            own: tuple[Tensor | None, Tensor | None, Any] = super()._communicate(
                tensor_send_next=send_next,
                tensor_send_prev=send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
            return own
        device = torch.cuda.current_device()
        dtype = config.pipeline_dtype
        previous = messages.incoming("forward", tensor_shape, dtype, device) if recv_prev else None
        following = messages.incoming("backward", tensor_shape, dtype, device) if recv_next else None
        exchange = _batched_p2p_ops if config.batch_p2p_comm else _p2p_ops
        requests = exchange(
            tensor_send_prev=send_prev,
            tensor_recv_prev=None if previous is None else previous.buffer,
            tensor_send_next=send_next,
            tensor_recv_next=None if following is None else following.buffer,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        received = [("recv_prev", previous), ("recv_next", following)]
        if wait_on_reqs:
            # a batch is a list: of one request for each operation, or with NCCL of one for all
            for request in requests.values() if isinstance(requests, dict) else requests:
                request.wait()
            for _, incoming in received:
                if incoming is not None:
                    incoming.finish()
            requests = None
        else:
            for name, incoming in received:
                if incoming is not None:
                    requests[name] = _Receive(requests[name], incoming)
        if config.batch_p2p_comm and config.batch_p2p_sync:
            torch.cuda.synchronize()
        return (
            None if previous is None else previous.tensor,
            None if following is None else following.tensor,
            requests,
        )
