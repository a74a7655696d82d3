"""What this machine can do, so that benches state fractions of what was measured and never of a data sheet.

    python bench/machine.py [--ranks N] [--threads T] [--bytes SIZE] [--device cuda] [--seconds S]
        [--run-name S] [--result-filename F]

    read      bytes a second of all ranks together: each reads memory of its own with T threads, all at the same
              time. The best pass, as a limit is what was reached once, and the median beside it
    matmul    operations a second at 2048 x 2048 x 2048, two for each multiplication, of all ranks together, by type
    sum       of 4 KiB of bfloat16 over the ranks of this host, in microseconds, from bench/allreduce.py

Each rank is a process (bench/machine_worker.py, which says what reads and why) on cores of its own where there are
enough. Other benches call `read_bandwidth`, also in one rank of a run while the others wait without spinning.
Figures are of a machine that does nothing else.
A working set that last-level caches hold is read from there, and the record says so in `fits_in_cache`.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from machine_ranks import Workers, clean_environment, cores_for, on_cores
from record import append, check_writable, surroundings

_LONGEST_READ = 1 << 30  # more bytes a rank take longer and tell nothing new
_MOST_PROCESSES = 1024


def read_bandwidth(
    bytes_per_rank: int, ranks: int, threads: int = 1, device: str = "cpu", seconds: float = 1.0
) -> float:
    """Bytes a second that all ranks together read at best, each of so many bytes of its own (see measured_bytes)."""
    return max(read_rates(bytes_per_rank, ranks, threads, device, seconds)[1])


def read_rates(
    bytes_per_rank: int, ranks: int, threads: int = 1, device: str = "cpu", seconds: float = 1.0
) -> tuple[str, list[float]]:
    """The reader (the faster one, where there are two), and the bytes a second of each pass."""
    with Workers("read", ranks, threads, device, measured_bytes(bytes_per_rank, ranks, device)) as workers:
        return max(((reader, workers.rates(reader, seconds)) for reader in workers.amounts), key=lambda x: max(x[1]))


def matmul_rates(ranks: int, threads: int = 1, device: str = "cpu", seconds: float = 1.0) -> dict[str, float]:
    """Operations a second of all ranks together at best, by type."""
    with Workers("matmul", ranks, threads, device) as workers:
        return {dtype: max(workers.rates(dtype, seconds)) for dtype in workers.amounts}


def allreduce_us(ranks: int) -> dict[str, float] | None:
    """Median microseconds of a sum of 4 KiB over ranks on this host's CPUs, by the way they talk; None for one."""
    if ranks < 2:
        return None
    with tempfile.TemporaryDirectory() as folder, on_cores(cores_for(ranks)):
        result = Path(folder) / "result"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        script = [str(Path(__file__).with_name("allreduce.py")), "--result-filename", str(result)]
        done = subprocess.run(
            [*launch, *script], env=clean_environment("OMP_NUM_THREADS"), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"bench/allreduce.py ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        records = [json.loads(line) for line in result.read_text().splitlines()]
    return next(record["median_us"] for record in records if record["bytes"] == 4096)


def measured_bytes(bytes_per_rank: int, ranks: int, device: str = "cpu") -> int:
    """What a rank reads for so many bytes: at most 1 GiB if caches are small beside it, and half of what is free.

    Of a GPU's free memory a quarter, as its ranks copy what they read.
    """
    largest = max(_LONGEST_READ, 4 * last_level_cache_bytes() // ranks)
    if device == "cpu":
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
        largest = min(largest, free // 2 // ranks)
    else:
        import torch

        count = torch.cuda.device_count()
        free = min(torch.cuda.mem_get_info(number)[0] for number in range(min(ranks, count)))
        largest = min(largest, free // 4 // -(-ranks // count))
    return min(bytes_per_rank, largest)


def last_level_cache_bytes() -> int:
    """Of all last-level caches of the machine, as the kernel knows them; 0 where it doesn't."""
    sizes: dict[tuple[int, str], int] = {}
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        level, shared, size = ((index / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
        sizes[int(level), shared] = int(size.removesuffix("K")) * 1024
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


def measure_all(arguments: argparse.Namespace) -> None:
    ranks, threads, device = arguments.ranks, arguments.threads, arguments.device
    check(arguments)
    size, cache = measured_bytes(arguments.bytes, ranks, device), last_level_cache_bytes() if device == "cpu" else 0
    reader, passes = read_rates(size, ranks, threads, device, arguments.seconds)
    matmul = matmul_rates(ranks, threads, device, arguments.seconds)
    record = {
        "bench": "machine", **surroundings(), "run_name": arguments.run_name, "device": device, "ranks": ranks,
        "threads": threads, "bytes_per_rank": size, "last_level_cache_bytes": cache,
        "fits_in_cache": size * ranks <= cache, "reader": reader, "read_bandwidth": round(max(passes)),
        "median_read_bandwidth": round(median(passes)),
        "matmul_ops": {dtype: round(rate) for dtype, rate in matmul.items()},
        "allreduce_4kib_us": allreduce_us(ranks) if device == "cpu" else None,
    }  # fmt: skip
    report(record)
    if arguments.result_filename:
        append(arguments.result_filename, record)


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError for what can't be measured; says so where threads have to take turns."""
    from tpllama.config import UserError
    from tpllama.start import resolve_device

    for name, most in (("ranks", _MOST_PROCESSES), ("threads", _MOST_PROCESSES), ("bytes", 1 << 60)):
        if not 1 <= (given := getattr(arguments, name)) <= most:
            raise UserError(f"found --{name} {given}, expected 1 to {most}")
    if not 0 < arguments.seconds < math.inf:
        raise UserError(f"found --seconds {arguments.seconds:g}, expected a number above 0")
    resolve_device(arguments.device)
    check_writable(arguments.result_filename)
    wanted, cores = arguments.ranks * arguments.threads, len(cores_for(arguments.ranks * arguments.threads))
    if arguments.device == "cpu" and wanted > cores:
        print(f"note: {wanted} threads take turns on {cores} cores", file=sys.stderr)


def report(record: Mapping[str, Any]) -> None:
    where = "  (fits in the last-level cache)" if record["fits_in_cache"] else ""
    print(f"{record['ranks']} ranks of {record['threads']} threads, {record['device']}, {record['cpu']}")
    read, middle = record["read_bandwidth"] / 1e9, record["median_read_bandwidth"] / 1e9
    size = f"{record['bytes_per_rank'] / 1e6:.0f} MB a rank"
    print(f"{'read, ' + size:<28}{read:>10.1f} GB/s    median {middle:.1f}{where}")
    for dtype, rate in record["matmul_ops"].items():
        print(f"{'matmul, ' + dtype:<28}{rate / 1e9:>10.1f} {'GOP/s' if dtype == 'int8' else 'GFLOP/s'}")
    for way, microseconds in (record["allreduce_4kib_us"] or {}).items():
        print(f"{'sum of 4 KiB, ' + way:<28}{microseconds:>10.1f} us")


def main() -> None:
    from tpllama.cli import Parser, _size, end, guarded

    parser = Parser(prog="machine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="T", help="of each rank")
    parser.add_argument("--bytes", type=_size, default=10**9, metavar="SIZE", help="that a rank reads, as in 300MB")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="of each measurement, at least")
    parser.add_argument("--run-name", default="default", metavar="S")
    parser.add_argument("--result-filename", metavar="F", help="JSON lines are appended to it")
    end(guarded("machine", lambda: measure_all(parser.parse_args()), is_debug=False))


if __name__ == "__main__":
    main()
