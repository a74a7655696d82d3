"""Llama as plain PyTorch modules, with Hugging Face's module and parameter names.

One device, no knowledge of how it is run: without a cache, the forward is the reference whose logits
equal transformers'. Attention takes its head counts from the tensors it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpllama.llama_config import LlamaConfig
from tpllama.model.rope import RotaryEmbedding, rotate

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class KVCache(Protocol):
    """One layer's keys and values of earlier tokens, and attention over them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores this step's k and v [tokens, kv_heads, head_dim]; attention of q [tokens, heads, head_dim]."""


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention within whole sequences: q [batch, seq, heads, head_dim], k and v with kv_heads; the shape of q."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, q_size, kv_size = (
            config.hidden_size,
            config.num_heads * self.head_dim,
            config.num_kv_heads * self.head_dim,
        )
        bias = config.attention_bias
        self.q_proj = nn.Linear(hidden, q_size, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, hidden, bias=bias)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: KVCache | None) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        attended = causal_attention(q, k, v) if cache is None else cache.attend(q, k, v)
        return self.o_proj(attended.flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: KVCache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Layers(nn.ModuleList):
    """Decoder layers, one after another."""

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], caches: Sequence[KVCache] | None) -> Tensor:
        for index, layer in enumerate(self):
            x = layer(x, cos_sin, None if caches is None else caches[index])
        return x


class Decoder(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = Layers(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = RotaryEmbedding(config)

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, caches: Sequence[KVCache] | None) -> Tensor:
        x = self.embed_tokens(tokens)
        cos_sin = self.rotary(positions, lengths, x.dtype)
        hidden: Tensor = self.layers(x, cos_sin, caches)
        return hidden


class Llama(nn.Module):
    """tokens in, logits out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        caches: Sequence[KVCache] | None = None,
        select: Tensor | None = None,
    ) -> Tensor:
        """Logits in the model's dtype.

        Without caches: tokens int64 [batch, seq] from position 0, logits [batch, seq, vocab].
        With one for each layer: tokens, positions and lengths (of each token's sequence, this step included) int64
        [n], of any mix of sequences that the caches know; `select` int64 [m] picks the tokens whose logits are
        wanted: [m, vocab].
        """
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape)
        if lengths is None:
            lengths = positions.amax(-1, keepdim=True) + 1
        x = self.model(tokens, positions, lengths, caches)
        if select is not None:
            x = x[select]
        return self.lm_head(self.model.norm(x))
