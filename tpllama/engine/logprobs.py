"""Log-probabilities of the model's own distribution, from logits that are split by vocabulary over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpllama.engine.filters import common_peak, mass
from tpllama.engine.request import TokenLogprobs
from tpllama.parallel.collectives import Ranks

# Logits that are handled together: this bounds the memory that a long prompt takes, and suits a CPU's cache.
_CPU_BLOCK, _GPU_BLOCK = 2**18, 2**25
_LOW_WORD = 0xFFFFFFFF


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int], start: int, vocab_size: int, ranks: Ranks
) -> list[TokenLogprobs]:
    """Of one token and the counts[i] likeliest, for each row of logits [n, own tokens from `start` on].

    Of equal tokens, the lowest ids are taken, and come first, however the vocabulary is split.
    """
    if not tokens:
        return []
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    total, chosen = _log_softmax_parts(logits, ids, start, ranks)
    top = _likeliest(logits, min(max(counts), vocab_size), start, ranks)
    top_ids = (_LOW_WORD - (top & _LOW_WORD)).tolist()
    top_values = (_value(top).double() - total[:, None]).tolist()
    return [
        TokenLogprobs(token, logprob, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        for token, logprob, count, row_ids, row_values in zip(
            tokens, (chosen - total).tolist(), counts, top_ids, top_values, strict=True
        )
    ]


def _log_softmax_parts(logits: Tensor, ids: Tensor, start: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The logarithm of each row's sum of exponentials and the logit of its id, over all ranks, float64 [n]."""
    peak = common_peak(logits.float(), ranks)
    columns = ids - start
    is_own = (columns >= 0) & (columns < logits.shape[1])
    own_logits = logits.gather(1, columns.clamp(0, logits.shape[1] - 1)[:, None])[:, 0].double()
    size = _rows_at_once(logits)
    blocks = zip(logits.split(size), peak.split(size), strict=True)
    sums = torch.cat([mass(block.float(), peaks).sum(dim=-1, dtype=torch.float64) for block, peaks in blocks])
    sums, chosen = ranks.gather(torch.stack((sums, own_logits.masked_fill(~is_own, -torch.inf)))).unbind(1)
    return peak.double() + sums.sum(dim=0).log(), chosen.amax(dim=0)


def _likeliest(logits: Tensor, most: int, start: int, ranks: Ranks) -> Tensor:
    """Keys of the largest logits over all ranks, falling, int64 [n, most]."""
    if most == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    own_most = min(most, logits.shape[1])
    blocks = logits.split(_rows_at_once(logits))
    own = torch.cat([_keys(block.float(), start).topk(own_most, dim=-1).values for block in blocks])
    offered = torch.nn.functional.pad(own, (0, most - own_most), value=torch.iinfo(torch.int64).min)
    return ranks.gather(offered).transpose(0, 1).flatten(1).topk(most, dim=-1).values


def _rows_at_once(logits: Tensor) -> int:
    return max(1, (_CPU_BLOCK if logits.device.type == "cpu" else _GPU_BLOCK) // logits.shape[1])


def _keys(logits: Tensor, start: int) -> Tensor:
    """Integers in the order of (logit, falling id), all different: float32's bits made monotonic, then the id's."""
    bits = (logits + 0.0).view(torch.int32)  # + 0 turns -0 into 0
    ids = torch.arange(start, start + logits.shape[1], device=logits.device)
    return ((bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32) + (_LOW_WORD - ids)


def _value(keys: Tensor) -> Tensor:
    """The logits, float32."""
    bits = (keys >> 32).int()
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).view(torch.float32)
