"""Peak memory of each rank while it loads: its packed share and about one decoder layer, never the whole model.

    python bench/load_memory.py [--shape 1b] [--tp 1 2] [--torchao-config int8wo] [--quantize] [--result-filename F]

Writes a checkpoint of random bfloat16 weights into a temporary folder, has ranks load it, and samples their
resident anonymous memory (RssAnon: what the process itself took, without pages of mapped files) every few
milliseconds from outside. The baseline is the same figure right before the first weight is read, when everything is
imported and the ranks have joined. Exits 1 where a rank's peak is past its bound:

    baseline + packed weights + the largest decoder layer, on one rank, in bfloat16 + 150 MB
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from record import append, cpu_model, versions
from shapes import SHAPES, write_checkpoint

FIXED_BYTES = 150_000_000
SAMPLE_EVERY_S = 0.002


@dataclass
class Measured:
    """What one rank took, in bytes."""

    baseline: int
    peak: int
    after: int
    packed: int
    layer: int
    seconds: float

    @property
    def bound(self) -> int:
        return self.packed + self.layer + FIXED_BYTES

    @property
    def taken(self) -> int:
        return self.peak - self.baseline

    def line(self, rank: int) -> str:
        parts = {
            "peak": self.peak, "= baseline": self.baseline, "+": self.taken, "; bound": self.bound,
            "= packed": self.packed, "+ layer": self.layer, "+ fixed": FIXED_BYTES, "; after loading": self.after,
        }  # fmt: skip
        megabytes = " ".join(f"{name} {size / 1e6:.0f}" for name, size in parts.items())
        return f"rank {rank}, MB: {megabytes.replace(' ;', ';')}; {self.seconds:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--torchao-config", default="int8wo")
    parser.add_argument("--quantize-lm-head", action="store_true")
    parser.add_argument("--quantize", action="store_true", help="measure tpllama quantize instead of loading")
    parser.add_argument("--result-filename")
    arguments = parser.parse_args()
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), SHAPES[arguments.shape])
        if arguments.quantize:
            taken = measure_quantize(Path(folder), arguments)
            peak, baseline, written = (taken[name] / 1e6 for name in ("peak", "baseline", "written"))
            print(f"tpllama quantize, {arguments.shape}, {arguments.torchao_config}: peak {peak:.0f} MB = baseline "
                  f"{baseline:.0f} + {peak - baseline:.0f}; {taken['seconds']:.1f} s for {written:.0f} MB")  # fmt: skip
            if arguments.result_filename:
                append(Path(arguments.result_filename), {"bench": "quantize_memory", **facts(arguments), **taken})
        for tp in arguments.tp if not arguments.quantize else []:
            print(
                f"{arguments.shape}, {arguments.torchao_config}, {tp} ranks (baseline: RssAnon before the first weight)"
            )
            engine = {"model": folder, "tp": tp, "torchao_config": arguments.torchao_config, "device": "cpu"}
            ranks = measure({**engine, "quantize_lm_head": arguments.quantize_lm_head})
            for rank, measured in enumerate(ranks):
                print(f"    {measured.line(rank)}", flush=True)
                missed |= measured.taken > measured.bound
            if arguments.result_filename:
                record(Path(arguments.result_filename), arguments, tp, ranks)
    if missed:
        sys.exit("a rank's peak is past its bound")


def measure(engine: dict[str, Any]) -> list[Measured]:
    """Loads on real ranks; what each took."""
    size = engine["tp"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd, port = listener.fileno(), listener.getsockname()[1]
        command = [sys.executable, __file__, "--as-rank", json.dumps(engine), str(port), str(fd)]
        root = str(Path(__file__).parents[1])
        ranks = [
            subprocess.Popen(
                [*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[fd],
                env=os.environ | {"PYTHONPATH": root}, stderr=None if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            for process in ranks:
                assert lines(process)[0] == "ready"
            samplers = [Sampler(process.pid) for process in ranks]
            for process in ranks:
                say(process, "load")
            return [finish(process, sampler) for process, sampler in zip(ranks, samplers, strict=True)]
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def measure_quantize(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Quantizes in a process of its own; its memory in bytes, before the first weight and at the most."""
    engine = {"model": str(folder), "torchao_config": arguments.torchao_config, "device": "cpu"}
    engine["quantize_lm_head"] = arguments.quantize_lm_head
    command = [sys.executable, __file__, "--as-quantize", json.dumps(engine), str(folder / "quantized")]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert lines(process)[0] == "ready"
            sampler = Sampler(process.pid)
            say(process, "quantize")
            _, seconds = lines(process)
            sampler.stop()
        finally:
            process.kill()
    written = sum(file.stat().st_size for file in (folder / "quantized").iterdir())
    return {"baseline": sampler.baseline, "peak": sampler.peak, "seconds": round(float(seconds), 2), "written": written}


def as_quantize(engine_json: str, out: str) -> None:
    """`tpllama quantize`, stopped before the first weight until it is told to go on."""
    from tpllama.checkpoint.open import open_for
    from tpllama.config import EngineConfig
    from tpllama.export import export
    from tpllama.start import draw_blueprint

    engine = EngineConfig(**json.loads(engine_json))
    checkpoint = open_for(engine)
    blueprint = draw_blueprint(engine, checkpoint)
    import_all(engine)
    tell("ready")
    sys.stdin.readline()
    started = time.perf_counter()
    export(blueprint, checkpoint, Path(out))
    tell("quantized", time.perf_counter() - started)
    sys.stdin.readline()


def import_all(engine: Any) -> None:
    """What torchao imports and starts on first use isn't the weights'."""
    import torch
    from torchao.quantization import quantize_

    from tpllama.quantization.recipes import RECIPES

    if recipe := RECIPES.get(engine.torchao_config):
        quantize_(torch.nn.Linear(256, 16, dtype=torch.bfloat16), recipe.config())


def finish(process: subprocess.Popen[str], sampler: Sampler) -> Measured:
    loaded = lines(process)
    sampler.stop()
    after = rss_anon(process.pid)
    return Measured(sampler.baseline, max(sampler.peak, after), after, int(loaded[1]), int(loaded[2]), float(loaded[3]))


def lines(process: subprocess.Popen[str]) -> list[str]:
    """The words of a rank's next line."""
    assert process.stdout is not None
    words = process.stdout.readline().split()
    if not words:
        sys.exit(f"a rank ended with exit code {process.wait()}")
    return words


def say(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


class Sampler:
    """Keeps the largest RssAnon of a process, from a thread of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.baseline = self.peak = rss_anon(pid)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(SAMPLE_EVERY_S):
            self.peak = max(self.peak, rss_anon(self.pid))

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def rss_anon(pid: int) -> int:
    """Resident anonymous memory of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"found no RssAnon for process {pid}")


def as_rank(engine_json: str, port: int, fd: int, rank: int) -> None:
    """One rank: everything up to the weights, then the weights, as start_rank does."""
    import torch

    from tpllama.build import LlamaLoader, weight_bytes
    from tpllama.checkpoint.open import open_checkpoint
    from tpllama.config import EngineConfig
    from tpllama.parallel.mesh import join
    from tpllama.parallel.place import Place, threads_per_rank
    from tpllama.start import draw_blueprint

    engine = EngineConfig(**json.loads(engine_json))
    size = engine.tp
    torch.set_num_threads(threads_per_rank(size, os.environ))
    checkpoint = open_checkpoint(engine.model)
    blueprint = draw_blueprint(engine, checkpoint)
    import_all(engine)
    place = Place(rank, size, rank, size, port)
    mesh, ranks = join(place, "cpu", socket.socket(fileno=fd) if rank == 0 and size > 1 else None)
    tell("ready")
    sys.stdin.readline()
    started = time.perf_counter()
    model = LlamaLoader(blueprint, checkpoint, mesh, ranks, torch.device("cpu")).load()
    seconds = time.perf_counter() - started
    layers = [sum(layer_bytes(blueprint.layer_rows(), index, rank)) for index in range(blueprint.config.num_layers)]
    tell("loaded", weight_bytes(model), max(layers), seconds)
    sys.stdin.readline()


def layer_bytes(rows: Iterator[dict[str, Any]], layer: int, rank: int) -> Iterator[int]:
    """Bytes in bfloat16 of a rank's part of each weight of a decoder layer."""
    for row in rows:
        if row["name"].startswith(f"model.layers.{layer}."):
            yield 2 * math.prod(row["local_shapes"][rank])


def tell(*words: object) -> None:
    print(*words, flush=True)


def record(path: Path, arguments: argparse.Namespace, tp: int, ranks: list[Measured]) -> None:
    measured = [{**vars(rank), "seconds": round(rank.seconds, 2), "bound": rank.bound} for rank in ranks]
    append(path, {"bench": "load_memory", **facts(arguments), "tp": tp, "ranks": measured})


def facts(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(), "shape": arguments.shape, "torchao_config": arguments.torchao_config,
        "quantize_lm_head": arguments.quantize_lm_head, "cpu": cpu_model(), "versions": versions(),
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        as_rank(sys.argv[2], *map(int, sys.argv[3:]))
    elif sys.argv[1:2] == ["--as-quantize"]:
        as_quantize(*sys.argv[2:])
    else:
        main()
