"""What ranks say to each other, as explicit operations on local tensors, and where a split module says it.

`Ranks` is all that the rest of the program sees of other processes. One rank needs no process group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpllama.recording import in_place

# One message of this size carries a whole step's description; a longer one is followed by its rest.
_FIRST_MESSAGE_BYTES = 4096
# What gloo says of a connection that ended, because the other process did or its host is out of reach.
_LOST = ("closed by", "reset by peer", "broken pipe", "timed out", "no route to host", "unreachable")


class RankLost(RuntimeError):
    """Another rank died or broke off; the run can't go on."""


class Ranks(Protocol):
    """A group of ranks in lockstep: each calls the same operations in the same order."""

    @property
    def rank(self) -> int:
        """This process, 0 being the leader."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bits on each. May overwrite x."""

    def max(self, x: Tensor) -> Tensor:
        """The elementwise maximum over ranks. May overwrite x."""

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's x, stacked: [size, *x.shape]. Shapes must agree."""

    def broadcast(self, message: bytes | None) -> bytes:
        """The leader's message, on every rank; the others give None."""

    def break_off(self) -> None:
        """This rank will do no more: the others, where they wait for it, end with RankLost."""


class OneRank:
    """No other process: every operation is the identity."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def max(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def broadcast(self, message: bytes | None) -> bytes:
        assert message is not None
        return message

    def break_off(self) -> None:
        pass


class ProcessGroupRanks:
    """Ranks joined by torch.distributed: `group` for tensors, `control` for messages between hosts' memories."""

    def __init__(self, group: dist.ProcessGroup, control: dist.ProcessGroup) -> None:
        self.group = group
        self.control = control
        self.rank = group.rank()
        self.size = group.size()

    def sum(self, x: Tensor) -> Tensor:
        return self._reduce(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        return self._reduce(x, dist.ReduceOp.MAX)

    def _reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        x = x.contiguous()
        with losing_ranks():
            dist.all_reduce(x, op=op, group=self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with losing_ranks():
            dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.stack(parts)

    def broadcast(self, message: bytes | None) -> bytes:
        first = torch.zeros(_FIRST_MESSAGE_BYTES, dtype=torch.uint8)
        if message is not None:
            framed = len(message).to_bytes(8, "little") + message
            head = framed[:_FIRST_MESSAGE_BYTES]
            first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        with losing_ranks():
            dist.broadcast(first, group=self.control, group_src=0)
        data = first.numpy().tobytes()
        length = int.from_bytes(data[:8], "little")
        rest_length = length + 8 - _FIRST_MESSAGE_BYTES
        if rest_length <= 0:
            return data[8 : 8 + length]
        rest = torch.zeros(rest_length, dtype=torch.uint8)
        if message is not None:
            rest = torch.frombuffer(bytearray(message[_FIRST_MESSAGE_BYTES - 8 :]), dtype=torch.uint8)
        with losing_ranks():
            dist.broadcast(rest, group=self.control, group_src=0)
        return data[8:] + rest.numpy().tobytes()

    def break_off(self) -> None:
        """Nothing: who leaves the group closes the connections on which the others wait."""


@contextmanager
def losing_ranks() -> Iterator[None]:
    """A collective fails when another rank breaks off; other failures are this rank's own."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        is_loss = isinstance(error, (dist.DistNetworkError, dist.DistBackendError))
        if is_loss or any(words in text.lower() for words in _LOST):
            said = re.sub(
                r"^\[\S+:\d+\] |\. This is typically caused by .*", "", text
            )  # gloo's place in its source, advice
            raise RankLost(f"lost another rank: {said[:200]}") from error
        raise


def sum_output(module: nn.Module, ranks: Ranks, owned: tuple[int, int]) -> nn.Module:
    """A row-split linear whose output is the sum of the ranks' summands."""
    module.register_forward_hook(lambda _module, _inputs, output: in_place(ranks.sum, output))
    return module


class OwnTokensEmbedding(nn.Module):
    """A vocabulary-split embedding: each rank looks up its own tokens, and the sum over ranks has all rows."""

    def __init__(self, embedding: nn.Module, ranks: Ranks, owned: tuple[int, int]) -> None:
        super().__init__()
        self.embedding = embedding
        self.ranks = ranks
        self.start, self.stop = owned

    def forward(self, tokens: Tensor) -> Tensor:
        foreign = (tokens < self.start) | (tokens >= self.stop)
        rows = self.embedding((tokens - self.start).masked_fill(foreign, 0))
        return self.ranks.sum(rows.masked_fill(foreign.unsqueeze(-1), 0))
