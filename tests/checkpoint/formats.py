"""Writers of the files that Meta and torchtune leave, from a state dict and config in Hugging Face's form."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

State = dict[str, torch.Tensor]

_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
_BY_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")
_WHOLE = ("attention_norm.weight", "ffn_norm.weight", "norm.weight", "attention.wo.bias", "feed_forward.w2.bias")


def meta_name(name: str) -> str:
    """Meta's name of a tensor, from Hugging Face's."""
    module, kind = name.rsplit(".", 1)
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    return f"layers.{match[1]}.{_NAMES[match[2]]}.{kind}" if match else f"{_NAMES[module]}.{kind}"


def meta_state(state: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> State:
    """The state in Meta's form: its names, and pairs of rotated rows side by side."""

    def interleaved(name: str, rows: torch.Tensor) -> torch.Tensor:
        if not re.search(r"self_attn\.[qk]_proj", name):
            return rows
        halves = rows.view(-1, 2, _head_dim(config) // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)

    return {meta_name(name): interleaved(name, value).clone() for name, value in state.items()}


def meta_params(config: Mapping[str, Any], style: str = "llama3", **changes: Any) -> dict[str, Any]:
    """params.json of the config; None removes a key. The two feed-forward settings give intermediate_size."""
    dim, inner = config["hidden_size"], config["intermediate_size"]
    params = {
        "dim": dim,
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config.get("num_key_value_heads"),
        "vocab_size": config["vocab_size"] if style == "llama3" else -1,
        "multiple_of": inner,
        "ffn_dim_multiplier": inner / int(8 * dim / 3),
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "rope_theta": config.get("rope_theta", 500000.0) if style == "llama3" else None,
        "head_dim": _head_dim(config) if _head_dim(config) * config["num_attention_heads"] != dim else None,
    } | changes
    return {key: value for key, value in params.items() if value is not None}


def write_meta(
    path: Path,
    state: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    shards: int = 1,
    style: str = "llama3",
    **params: Any,
) -> list[Path]:
    """params.json and consolidated.NN.pth; `style` is "llama3" or "llama2". Returns the weight files."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "params.json").write_text(json.dumps(meta_params(config, style, **params)))
    parts: list[State] = [{} for _ in range(shards)]
    for name, value in meta_state(state, config).items():
        by_columns = name.endswith(_BY_COLUMNS) or (style == "llama2" and name.startswith("tok_embeddings"))
        pieces = (value,) * shards if name.endswith(_WHOLE) else value.tensor_split(shards, dim=int(by_columns))
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece.clone(memory_format=torch.contiguous_format)
    files = [path / f"consolidated.{number:02d}.pth" for number in range(shards)]
    for file, part in zip(files, parts, strict=True):
        torch.save(part | ({"rope.freqs": torch.ones(_head_dim(config) // 2)} if style == "llama2" else {}), file)
    return files


def write_torchtune_meta(
    path: Path, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], files: int = 1, **params: Any
) -> list[Path]:
    """What torchtune's FullModelMetaCheckpointer leaves: whole tensors, each in one file. Returns the weight files."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "params.json").write_text(json.dumps(meta_params(config, **params)))
    items = list(meta_state(state, config).items())
    names = [path / f"model-{number + 1:05d}-of-{files:05d}.bin" for number in range(files)]
    for number, file in enumerate(names):
        torch.save(dict(items[number::files]), file)
    return names


def write_torchtune_hf(
    path: Path, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], files: int = 2, **params: Any
) -> None:
    """What torchtune's FullModelHFCheckpointer leaves: Hugging Face's form, and Meta's small files in original/."""
    (path / "original").mkdir(parents=True, exist_ok=True)
    (path / "original" / "params.json").write_text(json.dumps(meta_params(config, **params)))
    write_tiktoken(path / "original" / "tokenizer.model")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    items, weight_map = list(state.items()), {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = dict(items[number::files])
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(value.nbytes for value in state.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tiktoken(file: Path, corpus: Iterable[str] = ("some words to merge, some more words",)) -> dict[bytes, int]:
    """A tokenizer.model as Llama 3's: 256 bytes and up to 256 merges learned from the corpus. Returns the ranks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    )
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    by_rank = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    ranks = {bytes(byte_of[character] for character in token): rank for token, rank in by_rank}
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return ranks


def write_sentencepiece(file: Path, corpus: Iterable[str] = ("some words to merge",) * 20, **settings: Any) -> None:
    """A tokenizer.model trained with Llama 1's and 2's settings: BPE, bytes for what is unknown, digits apart."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    given = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "vocab_size": 400,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    } | settings
    SentencePieceTrainer.train(sentence_iterator=iter(corpus), model_writer=model, **given)
    file.write_bytes(model.getvalue())


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
