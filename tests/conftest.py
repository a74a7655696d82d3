"""Fixtures that several test folders share: small checkpoints, the reference model, the real command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

# One thread a rank, here and in what tests start: OpenMP spins where threads outnumber the cores that are free.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Odd on purpose: uneven heads, sizes that no power of two divides, biases everywhere.
TINY: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is none."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a seeded random Llama in Hugging Face form; keyword arguments change TINY. `biases` are random too."""
    made: dict[str, Path] = {}

    def make(**changes: Any) -> Path:
        key = repr(sorted(changes.items()))
        if key not in made:
            made[key] = _write_checkpoint(tmp_path_factory.mktemp("checkpoint"), TINY | changes)
        return made[key]

    return make


def _write_checkpoint(path: Path, fields: dict[str, Any]) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**fields, eos_token_id=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.08)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tinygemm_on_cpu() -> Iterator[None]:
    """tinygemm's operations for tensors of the CPU (kernels/tinygemm.py): torch has them for GPUs alone."""
    import torch
    from kernels import tinygemm

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_convert_weight_to_int4pack", tinygemm.tinygemm_pack)
    library.impl("_weight_int4pack_mm", tinygemm.tinygemm)
    yield
    library._destroy()


@pytest.fixture(scope="session")
def smollm2_reference() -> Any:
    """transformers' own float32 model of the embedded GGUF file, on which ours must agree."""
    import torch
    from transformers import AutoModelForCausalLM

    from tpllama.checkpoint.open import open_checkpoint

    path = open_checkpoint("smollm2").path
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tpllama() -> Run:
    """Runs the real command, `tpllama(*arguments, stdin=..., env=...)`, with a time limit."""

    def run(
        *arguments: str | Path, stdin: str = "", env: dict[str, str] | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tpllama", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=ROOT,
            env=os.environ | (env or {}),
            check=False,
        )

    return run
