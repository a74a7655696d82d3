"""Tensor names: every format's own, and the Hugging Face name it stands for.

Owns the spelling only; what the rows of a tensor mean is its reader's concern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_META_TOP = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
}
_META_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_GGUF_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")
_META_NAME = re.compile(r"(?:layers\.(?P<layer>\d+)\.)?(?P<module>\w+(?:\.\w+)?)\.(?P<kind>weight|bias)")


def from_gguf(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor of the `llama` architecture; None for a tensor no Llama has."""
    return _renamed(_GGUF_NAME.fullmatch(name), _GGUF_TOP, _GGUF_LAYER)


def from_meta(name: str) -> str | None:
    """Hugging Face's name of a tensor in Meta's own files; None for a tensor no Llama has."""
    return _renamed(_META_NAME.fullmatch(name), _META_TOP, _META_LAYER)


def part_name(weight: str, part: str) -> str:
    """torchao's name in safetensors for one of the plain tensors that the quantized `weight` consists of."""
    module, _, kind = weight.rpartition(".")
    return f"{module}._{kind}_{part}"


def _renamed(match: re.Match[str] | None, top: Mapping[str, str], in_layer: Mapping[str, str]) -> str | None:
    if match is None:
        return None
    layer, module, kind = match["layer"], match["module"], match["kind"]
    if layer is None:
        return f"{top[module]}.{kind}" if module in top else None
    return f"model.layers.{layer}.{in_layer[module]}.{kind}" if module in in_layer else None
