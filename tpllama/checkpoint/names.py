"""Tensor names: every format's own, and the Hugging Face name it stands for.

Owns the spelling only; what the rows of a tensor mean is its reader's concern.
"""

from __future__ import annotations

import re

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
_GGUF_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")


def from_gguf(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor of the `llama` architecture; None for a tensor no Llama has."""
    match = _GGUF_NAME.fullmatch(name)
    if match is None:
        return None
    layer, module, kind = match["layer"], match["module"], match["kind"]
    if layer is None:
        return f"{_GGUF_TOP[module]}.{kind}" if module in _GGUF_TOP else None
    return f"model.layers.{layer}.{_GGUF_LAYER[module]}.{kind}" if module in _GGUF_LAYER else None
