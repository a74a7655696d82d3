"""Collectives between hosts of several ranks each: within a host, between the first ranks of all hosts, and back.

Only first ranks use the network, and a message crosses it once per host. Sums are made in rank order on each host and
then in host order, whatever the size of the message, so all ranks compute the same bits.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tpllama.parallel.collectives import OneRank, ProcessGroupRanks, Ranks, losing_ranks
from tpllama.parallel.shared_memory import SharedMemoryRanks

# From here on each host adds up its share of a message and gives it to the others, in place of adding up all of it:
# two turns in place of one, but less to send where there are more than two hosts.
_SHARED_BYTES = 1 << 16


class HierarchicalRanks:
    """Ranks of more than one host. Constructed by all of them at once.

    hosts: the ranks of each, hosts in the order of their first ranks; one of a host's several can share memory with
    all others there.
    """

    def __init__(self, group: dist.ProcessGroup, hosts: list[list[int]], timeout: timedelta) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._num_hosts = len(hosts)
        self._most = max(map(len, hosts))
        place_of = {rank: (host, place) for host, ranks in enumerate(hosts) for place, rank in enumerate(ranks)}
        self._host_of, self._place_of = torch.tensor([place_of[rank] for rank in range(self.size)]).unbind(1)
        host, place = place_of[self.rank]
        global_ranks = dist.get_process_group_ranks(group)

        def joined(ranks: list[int]) -> dist.ProcessGroup:
            return dist.new_group([global_ranks[rank] for rank in ranks], timeout=timeout, backend="gloo")

        # Every rank has a part in making every group, in the same order.
        of_hosts = [joined(ranks) if len(ranks) > 1 else None for ranks in hosts]
        firsts = joined([ranks[0] for ranks in hosts]) if self._most > 1 else group
        own = of_hosts[host]
        self._within: Ranks = OneRank() if own is None else SharedMemoryRanks(own)
        self._between = ProcessGroupRanks(firsts, firsts) if place == 0 else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def sum(self, x: Tensor) -> Tensor:
        x = self._within.sum(x.contiguous())
        return self._spread(x if self._between is None else self._sum_over_hosts(self._between, x))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def max(self, x: Tensor) -> Tensor:
        x = self._within.max(x.contiguous())
        # Not gloo's, which loses NaN.
        return self._spread(x if self._between is None else self._between.gather(x).amax(0))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather(self, x: Tensor) -> Tensor:
        own = self._within.gather(x.contiguous())
        if self._between is None:
            everyone = x.new_empty(self._num_hosts, self._most, *x.shape)
        else:
            padded = x.new_zeros(self._most, *x.shape)
            padded[: len(own)] = own
            everyone = self._between.gather(padded)
        return self._spread(everyone)[self._host_of, self._place_of]

    def broadcast(self, message: bytes | None) -> bytes:
        if self._between is not None:
            message = self._between.broadcast(message)
        return self._within.broadcast(message)

    def break_off(self) -> None:
        """To the other hosts, who leaves the group closes the connections on which they wait."""
        self._within.break_off()

    def _spread(self, x: Tensor) -> Tensor:
        """The first rank's x, on every rank of its host: as bytes, to which the others add nothing."""
        flat = x.view(-1).view(torch.uint8)
        return self._within.sum(flat if self._between is not None else flat.zero_()).view(x.dtype).view(x.shape)

    def _sum_over_hosts(self, firsts: ProcessGroupRanks, x: Tensor) -> Tensor:
        if self._num_hosts == 2:
            return firsts.sum(x)  # two summands have no order
        if x.nbytes < _SHARED_BYTES:
            return _in_order(firsts.gather(x))
        share = -(-x.numel() // self._num_hosts)
        padded = x.new_zeros(self._num_hosts, share)
        padded.view(-1)[: x.numel()] = x.view(-1)
        of_all = torch.empty_like(padded)
        with losing_ranks():
            dist.all_to_all_single(of_all, padded, group=firsts.group)
        return firsts.gather(_in_order(of_all)).view(-1)[: x.numel()].view(x.shape)


def _in_order(parts: Tensor) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
