"""torch's kernel for sequences of any lengths, on a GPU, against ours, which any device runs."""

from __future__ import annotations

import pytest
import torch

from tpllama.engine.attention import SequencesAttention
from tpllama.engine.batch import Batch, Chunk
from tpllama.engine.cache import PagedCache
from tpllama.engine.memory import CacheShape
from tpllama.engine.varlen import VarlenAttention

CHUNKS = (
    Chunk(300, (0,), 1, ((2, 1), (0, 1))),
    Chunk(0, (0,) * 40, 40, ((1, 1),)),
    Chunk(255, (0, 0, 0), 258, ((4, 2),)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_block_tables_on_a_gpu(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    shape = CacheShape(1, 2, 64, str(dtype).removeprefix("torch."), 256, 6)
    cache = PagedCache(shape, 3, 0.125, dtype, device)
    [layer] = cache.layers
    for part in layer.parts():
        part.normal_(generator=generator)
    q = torch.randn(46, 6, 64, device=device, generator=generator).to(dtype)
    k, v = (torch.randn(46, 2, 64, device=device, generator=generator).to(dtype) for _ in range(2))
    cache.begin(Batch(CHUNKS), 46)
    assert isinstance(cache._step.attention, VarlenAttention)
    found = layer.attend(q, k, v)
    cache._planner._stored = torch.float32  # which the kernel doesn't take
    cache.begin(Batch(CHUNKS), 46)
    assert isinstance(cache._step.attention, SequencesAttention)
    torch.testing.assert_close(found, layer.attend(q, k, v), rtol=2e-2, atol=2e-2)


def test_only_caches_that_the_kernel_reads_take_it() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert VarlenAttention.fits(256, torch.bfloat16, cuda)
    assert not VarlenAttention.fits(16, torch.bfloat16, cuda)
    assert not VarlenAttention.fits(256, torch.int8, cuda)
    assert not VarlenAttention.fits(256, torch.bfloat16, cpu)


def test_what_the_kernel_is_told_of_a_step() -> None:
    step = VarlenAttention.of(CHUNKS, 256, 0.125, torch.device("cpu"))
    assert step._starts.tolist() == [0, 1, 41, 44]
    assert step._lengths.tolist() == [301, 40, 258]
    assert step._tables.tolist() == [[2, 0], [1, 0], [4, 5]]
