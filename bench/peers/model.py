"""The checkpoint that all contestants read: random bfloat16 weights of a shape, made once into the peers' folder."""

from __future__ import annotations

import json
from pathlib import Path

from peers.peer_frame import made_whole
from shapes import SHAPES, write_checkpoint

__all__ = ["SHAPES", "shared_model"]


def shared_model(home: Path, shape: str) -> Path:
    """A checkpoint in Hugging Face form, with what some peers ask for: the architecture's name and a tokenizer.

    The tokenizer knows single bytes only: prompts are token ids, so nothing is ever encoded by it.
    """
    folder = home / "models" / shape
    if (folder / "tokenizer_config.json").exists():  # the last that is written
        return folder
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    with made_whole(folder) as partial:
        write_checkpoint(partial, SHAPES[shape])
        config = json.loads((partial / "config.json").read_text())
        config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "torch_dtype": "bfloat16"}
        (partial / "config.json").write_text(json.dumps(config))
        letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(letters, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(partial / "tokenizer.json"))
        (partial / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
