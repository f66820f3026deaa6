"""The order in which a pipeline stage works through its micro-batches."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Work:
    """A pass of one micro-batch through one model chunk of a stage."""

    backward: bool
    chunk: int
    micro_batch: int


def one_forward_one_backward(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[Work]:
    """1F1B (Narayanan et al. 2019 and 2021, arXiv 2104.04473); with several ``chunks`` a stage it is interleaved.

    Raises ValueError for chunks whose micro-batches do not divide by the stages.
    """
    if chunks > 1 and micro_batches % stages:
        raise ValueError(
            f"{micro_batches} micro-batches over {stages} stages: an interleaved schedule needs a multiple"
        )
    whole = micro_batches * chunks

    def work(place: int, backward: bool) -> Work:
        """The ``place``-th pass of a kind. Interleaved chunks take turns, each with as many micro-batches as stages."""
        if chunks == 1:
            return Work(backward, 0, place)
        turn, within = divmod(place, stages * chunks)
        chunk, offset = divmod(within, stages)
        return Work(backward, chunks - 1 - chunk if backward else chunk, turn * stages + offset)

    ahead = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    ahead = min(ahead, whole)
    order = [work(place, False) for place in range(ahead)]
    for place in range(whole - ahead):
        order += [work(ahead + place, False), work(place, True)]
    return order + [work(place, True) for place in range(whole - ahead, whole)]
