"""One rank of test_matrix.py: builds every model under every recipe and saves what this rank got.

    python matrix_worker.py ORDERS RANK LISTENER_FD

ORDERS is a JSON file: size, port, out (a folder), batches (of token ids),
cases [{key, engine (EngineConfig's fields), keeps_weights}].
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpllama import build as composition
from tpllama import reading
from tpllama.blueprint import meta_model, named_linears
from tpllama.checkpoint.open import open_checkpoint
from tpllama.config import EngineConfig
from tpllama.kernels.linear import int4_parts
from tpllama.parallel.mesh import join, leave
from tpllama.parallel.place import Place
from tpllama.quantization.recipes import HEAD
from tpllama.start import draw_blueprint, run_model


def weight_parts(weight: Any) -> dict[str, Tensor]:
    """A neutral weight taken apart, scales and zero points as [rows, groups]. Nothing is dequantized."""
    match type(weight).__name__:
        case "Int4Tensor":
            q, scale, zero = int4_parts(weight)
            parts = {"qdata": q, "scale": scale.t(), "zero_point": zero.t()}
        case "IntxUnpackedToInt8Tensor":
            parts = {name: getattr(weight, name) for name in ("qdata", "scale", "zero_point")}
        case "Int8Tensor" | "Float8Tensor":
            parts = {"qdata": weight.qdata, "scale": weight.scale}
        case _:
            parts = {"qdata": weight}
    return {name: part.detach().clone() for name, part in parts.items()}


def launch(folder: Path, size: int, orders: dict[str, Any], timeout_s: float) -> None:
    """Runs `size` ranks of this program, which write into `folder`; `orders` has their batches and cases."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        path, fd = folder / f"orders{size}.json", listener.fileno()
        path.write_text(json.dumps({"size": size, "port": listener.getsockname()[1], "out": str(folder), **orders}))
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(path), str(rank), str(fd)],
                pass_fds=[fd], env=env, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=timeout_s)[1] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    assert [process.returncode for process in ranks] == [0] * size, "\n".join(said)


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text())
    rank, size = int(sys.argv[2]), orders["size"]
    torch.set_num_threads(1)  # quick on a busy machine too
    place = Place(rank, size, rank, size, orders["port"])
    mesh, ranks = join(place, "cpu", socket.socket(fileno=int(sys.argv[3])) if rank == 0 else None)
    packed: list[dict[str, Tensor]] = []
    pack = composition.pack

    def recording_pack(weight: Tensor, *rest: Any, **options: Any) -> nn.Module:
        packed.append(weight_parts(weight))
        return pack(weight, *rest, **options)

    composition.pack = recording_pack
    if size > 1:
        reading._BLOCK_ELEMENTS = {"cpu": 1}  # weights in blocks of 256 rows, where one rank has them whole
    for case in orders["cases"]:
        engine = EngineConfig(**case["engine"], tp=size, device="cpu")
        checkpoint = open_checkpoint(engine.model)
        blueprint = draw_blueprint(engine, checkpoint)
        packed.clear()
        loader = composition.LlamaLoader(blueprint, checkpoint, mesh, ranks, torch.device("cpu"))
        runner = run_model(loader, engine, ranks, size, torch.device("cpu"))
        result: dict[str, Any] = {
            "logits": [runner.logits(tokens) for tokens in orders["batches"]],
            "bytes": composition.weight_bytes(runner.model),
            "planned_bytes": blueprint.bytes_per_rank()[rank],
        }
        if case["keeps_weights"]:
            names = [name for name, _ in named_linears(meta_model(blueprint.config))]
            if blueprint.config.tie_word_embeddings and blueprint.decisions[HEAD].recipe is None:
                names.sort(key=lambda name: name != HEAD)  # packed with the embedding, before all others
            result["weights"] = dict(zip(names, packed, strict=True))
        torch.save(result, Path(orders["out"]) / f"{case['key']}.tp{size}.rank{rank}.pt")
    leave()


if __name__ == "__main__":
    main()
