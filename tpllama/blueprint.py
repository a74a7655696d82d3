"""What will be built: model, plan and recipe put together, before any weight is read and without other ranks.

Part of the composition root (see `build.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpllama.checkpoint.matching import check_tensors
from tpllama.checkpoint.open import Checkpoint, overridden
from tpllama.config import EngineConfig, UserError
from tpllama.engine.executor import ModelMetadata
from tpllama.engine.memory import CacheShape, asked_blocks
from tpllama.kernels.cuda import capability
from tpllama.kernels.linear import Form
from tpllama.kernels.pack import kernel_name, packed_bytes, with_kernel
from tpllama.llama_config import LlamaConfig
from tpllama.model.llama import Llama
from tpllama.parallel.plan import Placement, Plan, llama_plan, style_of
from tpllama.parallel.split import legal_tp
from tpllama.quantization.quantize import local_group_size
from tpllama.quantization.recipes import HEAD, Recipe, RecipeMap
from tpllama.quantization.report import Decision, decide, decide_stored
from tpllama.quantization.stored import StoredForm
from tpllama.stored_weights import stored_forms, whole_tensors

EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True)
class Blueprint:
    """The whole model on the meta device, with what becomes of every layer on every rank."""

    name: str
    config: LlamaConfig
    engine: EngineConfig
    tp: int
    device: str
    dtype: torch.dtype
    plan: Plan
    recipes: RecipeMap
    decisions: Mapping[str, Decision]
    shapes: Mapping[str, tuple[int, ...]]
    context_length: int
    stored: Mapping[str, StoredForm]
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def of(engine: EngineConfig, checkpoint: Checkpoint, device: str) -> Blueprint:
        """Raises UserError for whatever can be known now: config, degree, recipe, tensors that don't fit."""
        config = LlamaConfig.from_hf(overridden(checkpoint, engine.json_model_override_args))
        plan = llama_plan(config, engine.tp)
        recipes = RecipeMap.parse(engine.torchao_config, engine.quantize_lm_head)
        recipes.check_device(device, capability())  # once more below, where the files decide
        model = meta_model(config)
        linears = {name: tuple(linear.weight.shape) for name, linear in named_linears(model)}
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        stored = stored_forms(checkpoint)
        if engine.load_format != "dummy":
            check_tensors(config, shapes, whole_tensors(checkpoint, stored))
        if config.tie_word_embeddings and f"{HEAD}.weight" in stored:
            raise UserError(
                f"found {HEAD} stored quantized for a config that ties it to the embedding, expected "
                f"tie_word_embeddings false, set it in config.json or by --json-model-override-args"
            )
        if stored:
            of_module = {name.removesuffix(".weight"): form.recipe for name, form in stored.items()}
            recipes, decisions = decide_stored(linears, of_module, recipes, engine.strict)  # type: ignore[arg-type]
        else:
            decisions = decide(linears, recipes, engine.strict)  # type: ignore[arg-type]
        recipes.check_device(device, capability())
        return Blueprint(
            name=engine.model, config=config, engine=engine, tp=engine.tp, device=device,
            dtype=getattr(torch, engine.dtype), plan=plan, recipes=recipes, decisions=decisions, shapes=shapes,
            context_length=_context_length(config, engine.max_seq_len), stored=stored,
            eos_token_ids=_eos_token_ids(engine, checkpoint, config),
        )  # fmt: skip

    def heads(self, rank: int) -> tuple[int, int]:
        """Query heads and key-value heads of a rank."""
        q, kv = (self._local_rows(f"model.layers.0.self_attn.{name}", rank) for name in ("q_proj", "k_proj"))
        return q // self.config.head_dim, kv // self.config.head_dim

    def metadata(self, rank: int) -> ModelMetadata:
        """What a rank's share of the model will be."""
        num_heads, num_kv_heads = self.heads(rank)
        rope_limits = {"dynamic": self.config.max_position, "longrope": self.config.rope.original_max_position}
        return ModelMetadata(
            vocab_size=self.config.vocab_size,
            context_length=self.context_length,
            num_layers=self.config.num_layers,
            head_dim=self.config.head_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            owned_tokens=self.owned_tokens(rank),
            length_rope_limit=rope_limits.get(self.config.rope.rope_type),
            scale=self.config.head_dim**-0.5,
            eos_token_ids=self.eos_token_ids,
        )

    def owned_tokens(self, rank: int) -> tuple[int, int]:
        """The range of token ids whose logits a rank computes."""
        style = style_of(self.plan, HEAD)
        assert style is not None
        return style.ranges[rank]

    def _local_rows(self, module: str, rank: int) -> int:
        style = style_of(self.plan, module)
        assert style is not None
        start, stop = style.ranges[rank]
        return stop - start

    def layer_rows(self) -> Iterator[dict[str, Any]]:
        """A row of the report for every weight: linears, the embedding, norms."""
        for name, shape in self.module_shapes():
            placement = Placement.of(self.plan, name, shape, self.tp)
            decision = self.decisions.get(name, Decision(None, "not a linear layer"))
            forms = [self._form(name, decision.recipe, rank) for rank in range(self.tp)]
            is_linear = name in self.decisions
            yield {
                "name": name,
                "plan": placement.plan,
                "global_shape": list(shape),
                "local_shapes": [list(local) for local in placement.local_shapes],
                "action": decision.action,
                "recipe": decision.recipe.name if decision.recipe else "none",
                "group_size": (decision.recipe.group_size or None) if decision.recipe else None,
                "reason": with_kernel(decision.reason, forms, self.device, self.dtype),
                "kernel": self._kernel(forms[0], placement.local_shapes[0]) if is_linear else None,
            }

    def module_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every module with a weight, tied heads included, and the weight's global shape."""
        for parameter, shape in self.shapes.items():
            if parameter.endswith(".weight"):
                yield parameter.removesuffix(".weight"), shape
        if self.config.tie_word_embeddings:
            yield HEAD, self.shapes[f"{EMBEDDING}.weight"]

    def bytes_per_rank(self) -> list[int]:
        """Bytes of packed weights that each rank holds after loading."""
        return [self._rank_bytes(rank) for rank in range(self.tp)]

    def _rank_bytes(self, rank: int) -> int:
        total = 0
        for name, shape in self.module_shapes():
            style = style_of(self.plan, name)
            local = shape if style is None else style.local_shape(shape, rank)
            decision = self.decisions.get(name)
            if name == HEAD and self.config.tie_word_embeddings and not (decision and decision.recipe):
                continue  # shares the embedding's memory
            if decision is None or len(local) != 2:
                total += math.prod(local) * self.dtype.itemsize
            else:
                total += packed_bytes(self._form(name, decision.recipe, rank), *local, self.dtype, self.device)
            total += self._bias_bytes(name, rank)
        return total

    def _kernel(self, form: Form, local_shape: tuple[int, ...]) -> str:
        rows, columns = local_shape
        return kernel_name(form, rows, columns, self.device, self.dtype)

    def _form(self, name: str, recipe: Recipe | None, rank: int) -> Form:
        if recipe is None:
            return Form()
        style, group_size = style_of(self.plan, name), recipe.group_size
        if style is not None and style.dim == 1 and group_size:
            group_size = local_group_size(group_size, *style.ranges[rank])
        return Form(recipe.family.kind, group_size, recipe.family.dynamic)

    def _bias_bytes(self, name: str, rank: int) -> int:
        bias = self.shapes.get(f"{name}.bias")
        if bias is None:
            return 0
        style = style_of(self.plan, name)
        if style is not None and style.dim == 1:
            return bias[0] * self.dtype.itemsize if rank == 0 else 0
        return (self._local_rows(name, rank) if style else bias[0]) * self.dtype.itemsize

    def kv_bytes_per_token_per_rank(self) -> list[int]:
        """Bytes of keys and values that each rank keeps per token."""
        return [shape.bytes_per_token for shape in self._cache_shapes()]

    def kv_cache_bytes_per_rank(self) -> list[int] | None:
        """Bytes of each rank's whole cache; None where that is for the memory to say that is left when loaded."""
        blocks = self._asked_blocks()
        return None if blocks is None else [(blocks + 1) * shape.bytes_per_block for shape in self._cache_shapes()]

    @property
    def longest_request(self) -> int:
        """Tokens of prompt and text together: what the model takes, or the cache where its memory was asked for."""
        blocks, size = self._asked_blocks(), self._cache_shapes()[0].block_size
        return self.context_length if blocks is None else min(self.context_length, blocks * size)

    def _asked_blocks(self) -> int | None:
        asked = self.engine.kv_cache_memory
        return None if asked is None else asked_blocks(self._cache_shapes(), asked)

    def _cache_shapes(self) -> list[CacheShape]:
        return [self.metadata(rank).cache_shape(self.engine, self.device) for rank in range(self.tp)]

    def report(self) -> dict[str, Any]:
        """The whole plan, as `tpllama plan --json` prints it."""
        return {
            "model": self.name,
            "tp": self.tp,
            "recipe": self.recipes.name,
            "legal_tp": legal_tp(self.config),
            "bytes_per_rank": self.bytes_per_rank(),
            "kv_bytes_per_token_per_rank": self.kv_bytes_per_token_per_rank(),
            "kv_cache_bytes_per_rank": self.kv_cache_bytes_per_rank(),
            "layers": list(self.layer_rows()),
        }


def _eos_token_ids(engine: EngineConfig, checkpoint: Checkpoint, config: LlamaConfig) -> tuple[int, ...]:
    """What the user's override says, or all that the files name."""
    is_overridden = "eos_token_id" in (engine.json_model_override_args or {})
    return config.eos_token_ids if is_overridden else (*checkpoint.eos_token_ids, *config.eos_token_ids)


def _context_length(config: LlamaConfig, asked: int | None) -> int:
    """The longest sequence: the model's own, or less if the user says so."""
    longest = config.max_position
    if config.rope.rope_type == "dynamic":
        longest = int(longest * config.rope.parameters["factor"])
    if asked is not None and asked > longest:
        raise UserError(f"found max_seq_len {asked}, expected at most the model's {longest}, lower it")
    return asked or longest


def meta_model(config: LlamaConfig) -> Llama:
    """The plain model with shapes only."""
    with torch.device("meta"):
        return Llama(config).requires_grad_(False).eval()


def named_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Every nn.Linear by name, the output head last."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module
