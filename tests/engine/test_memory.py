"""How large the cache becomes: from what was asked for, what is needed, and what memory the process may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpllama.config import EngineConfig, UserError
from tpllama.engine.memory import CacheShape, asked_blocks, fitting_blocks, free_host_bytes, sized

# Of 1024 bytes a block.
SHAPE = CacheShape(num_layers=2, num_kv_heads=1, head_dim=16, dtype="float32", block_size=4)


def test_a_block_takes_its_keys_and_values_in_all_layers() -> None:
    assert SHAPE.bytes_per_block == 2 * 2 * 1 * 16 * 4 * 4 == 1024
    assert CacheShape(2, 3, 64, "bfloat16", 16).bytes_per_token == 2 * 2 * 3 * 64 * 2
    assert CacheShape(2, 3, 64, "int8", 16).bytes_per_token == 2 * 2 * 3 * (64 + 4)


@pytest.mark.parametrize(
    ("asked", "needed", "free", "expected"),
    [(10_240, 10_000, 1 << 30, 9), (10_239, 10_000, 1 << 30, 8), (None, 100, 1 << 30, 25), (None, 10_000, 20_480, 9)],
    ids=["asked", "a byte less", "needed", "free"],
)
def test_blocks_are_those_that_were_asked_for_or_are_needed_and_fit(
    asked: int | None, needed: int, free: int, expected: int
) -> None:
    blocks = fitting_blocks(SHAPE, asked, needed, free, "cpu")
    assert blocks == expected
    # One more block fills up steps; with it the cache is no larger than what was asked for.
    assert sized(SHAPE, blocks, 0, is_lazy=False).num_bytes <= (asked or free)


def test_every_rank_has_as_many_blocks_as_the_one_with_the_largest() -> None:
    larger = CacheShape(2, 2, 16, "float32", 4)
    assert asked_blocks([SHAPE, larger], 10_240) == asked_blocks([larger], 10_240) == 4


def test_what_cannot_be_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"found 2047 bytes .* two blocks of 1024"):
        asked_blocks([SHAPE], 2047)
    with pytest.raises(UserError, match=r"found 4000 bytes asked .* at most the 3000"):
        fitting_blocks(SHAPE, 4000, 100, 3000, "cpu")
    with pytest.raises(UserError, match="found 3000 bytes free"):
        fitting_blocks(SHAPE, None, 100, 3000, "cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_cache_memory", 0), ("kv_cache_memory", 10**30), ("kv_cache_memory", "1"), ("swap_memory", -1),
        ("swap_memory", True), ("block_size", 0), ("block_size", 10**9), ("max_batch_tokens", 3 * 10**7),
        ("prefix_caching", "false"), ("chunked_prefill", 1), ("kv_cache_dtype", "int4"),
    ],
)  # fmt: skip
def test_impossible_options_are_named(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"found {name} "):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 8000 kB\nMemAvailable: 4000 kB\n"}


def test_without_groups_what_the_system_has_is_free(tmp_path: Path) -> None:
    assert free_host_bytes(write(tmp_path, MEMINFO)) == 4000 * 1024
    assert free_host_bytes(tmp_path / "nowhere") is None


NESTED_GROUPS = {
    "proc/self/cgroup": "0::/job.slice/step\n",
    "sys/fs/cgroup/job.slice/step/memory.max": "max\n",
    "sys/fs/cgroup/job.slice/step/memory.current": "5\n",
    "sys/fs/cgroup/job.slice/step/memory.stat": "anon 5\n",
    "sys/fs/cgroup/job.slice/memory.max": "1000000\n",
    "sys/fs/cgroup/job.slice/memory.current": "900000\n",
    "sys/fs/cgroup/job.slice/memory.stat": "anon 100000\nactive_file 500000\ninactive_file 300000\n",
}
GROUPS_OF_THE_OLDER_KIND = {
    "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2000000\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1500000\n",
    "sys/fs/cgroup/memory/job/memory.stat": "total_active_file 100000\ntotal_inactive_file 0\n",
}


@pytest.mark.parametrize(("files", "free"), [(NESTED_GROUPS, 900_000), (GROUPS_OF_THE_OLDER_KIND, 600_000)])
def test_the_tightest_group_above_the_process_counts_and_pages_of_files_are_free(
    tmp_path: Path, files: dict[str, str], free: int
) -> None:
    assert free_host_bytes(write(tmp_path, MEMINFO | files)) == free
