"""Messages from one process to another in low rank, with lazy error propagation. Pure tensors, no collectives.

Optimus-CC (Song et al., ASPLOS 2023) compresses the gradients that pipeline stages send back so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc.comm.packed import Packed
from edgc.comm.wire import Wire
from edgc.compress import lowrank, spikes
from edgc.errors import StepError

HEADER_BYTES = 32
STAGES = 1024  # more than a pipeline has


class UnexpectedMessage(StepError):
    """A message other than the one that its receiver had to expect."""


@dataclass(frozen=True)
class MessageFormat:
    """What sender and receiver both know of a message that holds a (rows x cols) matrix.

    ``rank``: of the factors P (rows x rank) and Q (cols x rank), which travel one behind the other in ``wire``. At
    rank 0 the values travel, in ``wire``; with None, or where factors would not be smaller, in ``dtype``. Before
    either comes a header of 32 bytes with step, sender, direction, place in the step, rank and size, by which a
    receiver tells whether it is the right message.
    """

    rows: int
    cols: int
    rank: int | None
    wire: Wire
    dtype: torch.dtype

    @property
    def dense_bytes(self) -> int:
        """Size of the values themselves."""
        return self.rows * self.cols * self.dtype.itemsize

    @property
    def used_rank(self) -> int | None:
        """The rank in use: clamped to the matrix's own; None where it would not pay."""
        if not self.rank:
            return self.rank
        rank = lowrank.limited(self.rank, self.rows, self.cols)
        return rank if self._packed_bytes(rank) < self.dense_bytes else None

    @property
    def bytes(self) -> int:
        """Size of the whole message."""
        rank = self.used_rank
        return HEADER_BYTES + (self.dense_bytes if rank is None else self._packed_bytes(rank))

    def _packed_bytes(self, rank: int) -> int:
        if not rank:
            return self.wire.tensor_bytes(self.rows * self.cols)
        return sum(self.wire.tensor_bytes(side * rank) for side in (self.rows, self.cols))

    def header(self, step: int, sender: int, forward: bool, index: int) -> Tensor:
        """int64 (4,): step, which of its messages (see ``described_header``), rank (0: none), size."""
        which = (index * 2 + forward) * STAGES + sender
        return torch.tensor([step, which, self.used_rank or 0, self.bytes], dtype=torch.int64, device="cpu")

    def decode(self, message: Tensor) -> Tensor:
        """uint8 (bytes,) -> (rows x cols) in ``dtype``, whatever the header says."""
        body, rank = message[HEADER_BYTES:], self.used_rank
        if rank is None:
            return body.view(self.dtype).view(self.rows, self.cols)
        if not rank:
            shape = torch.Size((self.rows, self.cols))
            return Packed.restored(body.unsqueeze(0), shape, self.wire).values().to(self.dtype)
        split = self.wire.tensor_bytes(self.rows * rank)
        p, q = (
            Packed.restored(part.unsqueeze(0), torch.Size((rank, side)), self.wire).values()
            for part, side in ((body[:split], self.rows), (body[split:], self.cols))
        )
        return (p.T @ q).to(self.dtype)


def described_header(header: Sequence[int]) -> str:
    """A header in words."""
    step, which, rank, size = header
    index, sender = which // (2 * STAGES), which % STAGES
    return f"{size} bytes of rank {rank}, message {index + 1} of stage {sender + 1} in step {step}"


class MessageSender:
    """What one process keeps of the messages it sends over one boundary. The receiver keeps nothing.

    For each message, with V (cols x rank) and the error from the one before:

    1. M = matrix + error
    2. P = orthonormal(M V)      travels
    3. Q = M^T P                 travels; with P as the receiver gets it
    4. error = M - P Q^T         with both as the receiver gets them
    5. V = orthonormal(Q)

    At rank 0 M itself travels, rounded. What is left of a spike (``spikes``) is scaled down before it becomes
    the error; the spike itself travels, since the backward pass of its own micro-batch needs it. A matrix of zeros
    keeps V.

    So the error of a micro-batch is sent with the next one, and that of a step's last with the next step's first.
    Without ``feedback`` there is no error: activations belong to their own samples alone.
    """

    def __init__(self, feedback: bool, *seed: object, spike_limit: float):
        self.feedback = feedback
        self.spike_limit = spike_limit
        self.error: Tensor | None = None  # (rows x cols) fp32, not multiplied by a loss scale
        self.basis: Tensor | None = None  # V
        self.norm: Tensor | None = None  # running norm of the matrices; all three are replaced, never changed
        self.spikes: Tensor | float = 0.0  # matrices so far of which the error was scaled down
        self._seed = seed

    def state_dict(self) -> dict[str, Tensor | None]:
        return {"error": self.error, "basis": self.basis, "norm": self.norm}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        self.error, self.basis, self.norm = state["error"], state["basis"], state["norm"]

    def encode(self, matrix: Tensor, form: MessageFormat, header: Tensor, scale: Tensor | None = None) -> Tensor:
        """(rows x cols), ``scale`` times what it stands for -> uint8 (bytes,).

        A matrix that is not finite arrives as NaN and leaves the state as it is.
        """
        rank, head = form.used_rank, header.to(matrix.device, non_blocking=True).view(torch.uint8)
        if rank is None and self.error is None:
            return torch.cat([head, matrix.to(form.dtype).reshape(-1).view(torch.uint8)])
        total = matrix.float()
        if self.feedback:
            before = torch.zeros((), dtype=torch.float32, device=matrix.device) if self.norm is None else self.norm
            norm = torch.linalg.vector_norm(total)
            norm = norm if scale is None else norm / scale
            excess = spikes.excess(norm, before, self.spike_limit)
            healthy = torch.isfinite(total).all()
            self.spikes = self.spikes + ((excess > 1) & healthy).float()
            self.norm = spikes.moved(norm, before, healthy, self.spike_limit)
        if self.error is not None:
            total = total + (self.error if scale is None else self.error * scale)
        if rank is None:
            body, basis = [total.to(form.dtype).reshape(-1).view(torch.uint8)], self.basis
        elif not rank:
            body, basis = [Packed(total, form.wire).message[0]], self.basis
        else:
            start = lowrank.resize(self.basis, form.cols, rank, matrix.device, *self._seed)
            finite = torch.isfinite(total).all()
            usable = torch.where(finite, total, 0.0)  # factorisations refuse what is not finite
            p = Packed(lowrank.orthonormalise(usable @ start).T.contiguous(), form.wire)
            q = Packed(p.values() @ usable + torch.where(finite, 0.0, torch.nan), form.wire)
            body = [p.message[0], q.message[0]]
            learned = lowrank.orthonormalise(torch.where(finite, q.values(), 0.0).T)
            basis = torch.where(finite & q.values().any() & torch.isfinite(learned).all(), learned, start)
        message = torch.cat([head, *body])
        if self.feedback:
            error = (total - form.decode(message).float()) / excess  # with all that rounding changes on the way
            if scale is not None:
                error /= scale
            before = torch.zeros_like(error) if self.error is None else self.error
            self.error = torch.where(torch.isfinite(error).all(), error, before)
        self.basis = basis
        return message
