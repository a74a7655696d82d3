"""What ranks say to each other, between real processes, in shared memory and through torch.distributed alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tpllama.parallel.collectives import OneRank, OwnTokensEmbedding, sum_output

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_is_right_for_every_dtype_and_shape(run_ranks: RunRanks, size: int) -> None:
    by_rank = run_ranks("reduce_and_gather", size)
    for results in zip(*by_rank, strict=True):
        stacked = torch.stack([result["x"] for result in results])
        expected = {"sum": stacked.sum(0).to(stacked.dtype), "max": stacked.amax(0), "gather": stacked}
        for result in results:
            wanted = expected[result["operation"]]
            assert result["result"].dtype == wanted.dtype
            assert result["result"].shape == wanted.shape
            assert torch.equal(result["result"], wanted), (result["ranks"], result["operation"], wanted.shape)


def test_sums_that_round_have_the_same_bits_on_every_rank(run_ranks: RunRanks) -> None:
    by_rank = run_ranks("sum_floats", 3)
    for name in ("shared", "group"):
        for result in by_rank[1:]:
            assert all(torch.equal(*pair) for pair in zip(result[name], by_rank[0][name], strict=True))
    for index, shared in enumerate(by_rank[0]["shared"]):
        in_order = by_rank[0]["x"][index]
        for result in by_rank[1:]:
            in_order = in_order + result["x"][index]
        assert torch.equal(shared, in_order)
        rounding = 8 * torch.finfo(shared.dtype).eps  # the group adds in an order of its own
        torch.testing.assert_close(by_rank[0]["group"][index], shared, rtol=0, atol=rounding)


@pytest.mark.parametrize("size", [2, 3], ids=["a core each", "three ranks on one core"])
def test_long_mixes_of_operations_stay_right(run_ranks: RunRanks, size: int) -> None:
    for right in run_ranks("many_operations", size):
        assert len(right) == 200
        assert all(right)


def test_messages_of_any_length_arrive(run_ranks: RunRanks) -> None:
    leader, *others = run_ranks("broadcast", 3)
    assert {len(message) for _, message in leader} >= {0, 1, 4087, 4088, 4089, (1 << 18) - 8, (1 << 18) - 7, 1_000_003}
    assert all(received == leader for received in others)
    pairs = list(zip(leader[::2], leader[1::2], strict=True))
    assert all(shared[0] == "shared" and group[0] == "group" and shared[1] == group[1] for shared, group in pairs)


@pytest.mark.parametrize("ranks", ["shared", "group"])
def test_a_killed_rank_makes_the_others_raise(lose_rank: Callable[[str], list[Any]], ranks: str) -> None:
    for found in lose_rank(ranks):
        assert found["error"] is not None
        assert found["seconds"] < 5
        if ranks == "shared":
            assert found["error"] == "rank 1 is gone"


def test_shared_memory_has_no_file(run_ranks: RunRanks) -> None:
    for opened in run_ranks("open_files", 2):
        assert "memfd:tpllama" in opened
        assert "/dev/shm" not in opened


def test_one_rank_needs_no_others() -> None:
    ranks, x = OneRank(), torch.arange(6.0).view(2, 3)
    assert torch.equal(ranks.sum(x), x)
    assert torch.equal(ranks.max(x), x)
    assert ranks.gather(x).shape == (1, 2, 3)
    assert ranks.broadcast(b"hello") == b"hello"


class Recorder(OneRank):
    """Keeps what was summed."""

    def __init__(self) -> None:
        self.summed: list[Tensor] = []

    def sum(self, x: Tensor) -> Tensor:
        self.summed.append(x)
        return x


def test_embedding_rows_of_split_vocabularies_add_up() -> None:
    whole = nn.Embedding(10, 4)
    tokens = torch.tensor([[0, 3, 4], [9, 6, 3]])
    parts = []
    for start, stop in ((0, 4), (4, 7), (7, 10)):
        part, ranks = nn.Embedding(stop - start, 4, _weight=whole.weight[start:stop].detach()), Recorder()
        parts.append(OwnTokensEmbedding(part, ranks, (start, stop))(tokens))
        assert len(ranks.summed) == 1
    assert torch.equal(torch.stack(parts).sum(0), whole(tokens))


def test_a_row_split_linears_output_is_summed() -> None:
    linear, ranks, x = nn.Linear(3, 2), Recorder(), torch.randn(5, 3)
    assert torch.equal(sum_output(linear, ranks, (0, 3))(x), ranks.summed[0])
