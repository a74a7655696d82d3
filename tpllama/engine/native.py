"""What the engine computes in our own C++, for models and caches in bfloat16 on the CPU.

Attention over the paged cache: of texts by kernels/fused.cpp; of prompts, where there is AMX, by kernels/prompt.cpp.
The likeliest tokens: kernels/likeliest.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpllama.kernels import fused
from tpllama.kernels.fused import Spans
from tpllama.kernels.likeliest import likeliest as likeliest
from tpllama.kernels.prompt import Prompts

if TYPE_CHECKING:
    from tpllama.engine.attention import SequencesAttention
    from tpllama.engine.cache import PlainStore


class NativeAttention:
    """Of texts, one token each, on keys and values where they lie, and of prompts; the rest `others` computes.

    slots int64 [tokens]: where keys and values go. texts: of each its row of the step, and (first slot, number of
    slots) of what it looks at. prompts: of each the row of its first token, how many tokens, and the same.
    """

    def __init__(
        self, slots: Tensor, texts: list[tuple[int, Spans]], prompts: list[tuple[int, int, Spans]], scale: float,
        others: SequencesAttention | None,
    ) -> None:  # fmt: skip
        self._step = fused.Step(slots, texts, scale)
        self._tokens = len(slots)
        # Rows that only fill up a step are nobody's.
        self._is_full = self._step.texts + sum(count for _, count, _ in prompts) == self._tokens
        self._prompts = Prompts(prompts, scale)
        self._others = others

    @staticmethod
    def fits(stored: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there is code for a cache of a stored dtype, and computation in `dtype`."""
        return stored == dtype == torch.bfloat16 and device.type == "cpu" and fused.is_available()

    @property
    def single_texts(self) -> fused.Step | None:
        """What the step looks at, where it has nothing but texts."""
        return self._step if self._step.texts == self._tokens and self._others is None else None

    def keep_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: tuple[Tensor, Tensor] | None, keys: PlainStore,
        values: PlainStore,
    ) -> Tensor:  # fmt: skip
        """Stores k, v [tokens, kv_heads * head_dim]; attention of q [tokens, heads * head_dim].

        With cos_sin, q and k are rotated before: q where it is.
        """
        head_dim = keys.data.shape[-1]
        out = (torch.empty if self._is_full else torch.zeros)(q.shape, dtype=q.dtype)
        fused.attend(self._step, q, k, v, head_dim, cos_sin, keys.data, values.data, out)
        if self._prompts:
            self._prompts.attend(q, keys.data, values.data, out)
        if self._others is not None:
            q, in_heads = (each.unflatten(1, (-1, head_dim)) for each in (q, out))
            self._others.attend_others(q, in_heads, keys, values)
        return out
