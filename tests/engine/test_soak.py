"""Many requests later, the process is as large as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tpllama import LLM, SamplingParams

MEGABYTE = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def soak(llm: LLM, vocab: int, requests: int) -> tuple[int, int]:
    """Resident memory after a tenth of the requests, and after all."""
    chance = random.Random(0)
    early = 0
    for done in range(0, requests, 100):
        if done == requests // 10:
            early = resident_bytes()
        prompts = [[chance.randrange(vocab) for _ in range(chance.randint(1, 24))] for _ in range(100)]
        each = [SamplingParams(max_new_tokens=chance.randint(1, 4), seed=done, temperature=1.0) for _ in prompts]
        llm.generate(prompts, each)
    llm.engine.scheduler.check()
    assert llm.engine.pool.num_available == llm.engine.pool.size
    return early, resident_bytes()


def test_ten_thousand_requests_leave_nothing_behind(make_checkpoint: Callable[..., Path]) -> None:
    with LLM(str(make_checkpoint()), dtype="float32") as llm:
        early, late = soak(llm, 211, 10_000)
    assert late - early < 12 * MEGABYTE, f"{early / MEGABYTE:.0f} MiB, then {late / MEGABYTE:.0f}"


@pytest.mark.slow
def test_ten_thousand_requests_to_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(torchao_config="int8dq") as llm:
        early, late = soak(llm, 40_000, 10_000)
        warm = llm.engine.executor.cache_shape.num_warm_blocks
        kept = len(llm.engine.pool._kept)
    with capsys.disabled():
        print(
            f"{early / MEGABYTE:.0f} MiB after 1000 requests, {late / MEGABYTE:.0f} after 10000, {kept} of {warm} kept"
        )
    assert late - early < 40 * MEGABYTE
