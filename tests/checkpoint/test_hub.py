"""Hub ids: which files are asked for, the cache, and what fails."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tpllama.checkpoint import huggingface
from tpllama.checkpoint.huggingface import hub_snapshot
from tpllama.checkpoint.open import open_checkpoint


def test_hub_model_from_the_cache_prefers_safetensors(monkeypatch: pytest.MonkeyPatch, hf_directory: Path) -> None:
    asked: list[list[str]] = []

    def snapshot(model_id: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(hf_directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert hub_snapshot("org/name") == hf_directory
    assert len(asked) == 1
    assert not any(pattern.endswith(".bin") for pattern in asked[0])
    (hf_directory / "model.safetensors").unlink()
    hub_snapshot("org/name")
    assert any(pattern.endswith(".bin") for pattern in asked[-1])
    hub_snapshot("org/name", weights=False)
    assert not any(pattern.startswith(("model", "pytorch_model")) for pattern in asked[-1])


def test_hub_cache_is_read_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hf_directory: Path) -> None:
    commit = "0" * 40
    repository = tmp_path / "cache" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (hf_directory / name).rename(repository / "blobs" / f"hash-of-{name}")
        (repository / "snapshots" / commit / name).symlink_to(f"../../blobs/hash-of-{name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    checkpoint = open_checkpoint("org/name")
    assert "model.norm.weight" in checkpoint.tensors


def test_hub_model_not_in_the_cache_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    fails(lambda: hub_snapshot("org/name"), "'org/name'")


def test_impossible_hub_id(monkeypatch: pytest.MonkeyPatch, fails: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    fails(lambda: hub_snapshot("org/na--me.."), "'org/na--me..'")


def test_patterns_cover_the_usual_files() -> None:
    wanted = (
        *("config.json", "generation_config.json", "vocab.json", "merges.txt", "chat_template.jinja"),
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
        *("added_tokens.json", "special_tokens_map.json"),
    )
    for file in wanted:
        assert any(fnmatch(file, pattern) for pattern in huggingface._SMALL_FILES)
