"""The tensor-parallel plan: which rows or columns of which weight each rank owns.

`llama_plan` is the table. It maps module-name patterns to DTensor parallel styles, as
`torch.distributed.tensor.parallel.parallelize_module` takes them; what is not in it is replicated.
Sizes come from the config alone, so a plan needs no process group. Knows nothing of recipes and files.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tpllama.llama_config import LlamaConfig
from tpllama.parallel.collectives import OwnTokensEmbedding, Ranks, sum_output
from tpllama.parallel.shard import RangeShard, distribute_parameter
from tpllama.parallel.split import Ranges, check_tp, scale, split_heads, split_size

PlanName = Literal["column", "row", "vocab", "replicate"]
Connect = Callable[[nn.Module, Ranks, tuple[int, int]], nn.Module]


class Split(ParallelStyle):
    """Splits one dimension of a module's weight over the ranks by given ranges.

    `connect` gives the module with the collective that its input or output needs, once it holds its local weight.
    """

    def __init__(self, plan: PlanName, dim: int, ranges: Ranges, connect: Connect | None = None) -> None:
        super().__init__()
        self.plan: PlanName = plan
        self.dim = dim
        self.ranges = ranges
        self.connect = connect

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The shape of rank's part of a weight of global `shape`."""
        start, stop = self.ranges[rank]
        return tuple(stop - start if dim == self.dim else size for dim, size in enumerate(shape))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameter(module, "weight", device_mesh, RangeShard(self.dim, self.ranges))
        if getattr(module, "bias", None) is not None:
            if self.dim == 0:
                distribute_parameter(module, "bias", device_mesh, RangeShard(0, self.ranges))
            elif device_mesh.get_local_rank() != 0:
                module.register_parameter("bias", None)  # added once to the sum over ranks, by the first
        return module


def column(ranges: Ranges) -> Split:
    """Splits out_features: each rank computes its own part of the output."""
    return Split("column", 0, ranges)


def row(ranges: Ranges) -> Split:
    """Splits in_features: each rank computes a summand of the output."""
    return Split("row", 1, ranges, connect=sum_output)


def vocab_embedding(ranges: Ranges) -> Split:
    """Splits the rows of an embedding table: each rank looks up its own tokens."""
    return Split("vocab", 0, ranges, connect=OwnTokensEmbedding)


def vocab_head(ranges: Ranges) -> Split:
    """Splits the output head: each rank keeps the logits of its own tokens; the sampler knows."""
    return Split("vocab", 0, ranges)


Plan = dict[str, Split]


def llama_plan(config: LlamaConfig, tp: int) -> Plan:
    """The styles of every split module of a Llama over `tp` ranks. Raises UserError for an impossible `tp`."""
    check_tp(config, tp)
    q, kv = (scale(ranges, config.head_dim) for ranges in split_heads(config.num_heads, config.num_kv_heads, tp))
    mlp, vocab = split_size(config.intermediate_size, tp), split_size(config.vocab_size, tp)
    return {
        "model.embed_tokens": vocab_embedding(vocab),
        "model.layers.*.self_attn.q_proj": column(q),
        "model.layers.*.self_attn.k_proj": column(kv),
        "model.layers.*.self_attn.v_proj": column(kv),
        "model.layers.*.self_attn.o_proj": row(q),
        "model.layers.*.mlp.gate_proj": column(mlp),
        "model.layers.*.mlp.up_proj": column(mlp),
        "model.layers.*.mlp.down_proj": row(mlp),
        "lm_head": vocab_head(vocab),
    }


def style_of(plan: Plan, name: str) -> Split | None:
    """The style of module `name`, None where it is replicated."""
    return next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)


@dataclass(frozen=True)
class Placement:
    """What the plan does with one weight, as `tpllama plan` reports it."""

    plan: PlanName
    local_shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(plan: Plan, name: str, shape: tuple[int, ...], tp: int) -> Placement:
        """Module `name`'s weight of global `shape`, over `tp` ranks."""
        style = style_of(plan, name)
        if style is None:
            return Placement("replicate", (shape,) * tp)
        return Placement(style.plan, tuple(style.local_shape(shape, rank) for rank in range(tp)))
