"""Names of the tensors in a LoRA adapter's file: whose they are, and which part of the adapter they hold.

Owns the spellings of PEFT, torchtune and Meta; knows no files, shapes or values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tpllama.checkpoint.names import from_meta
from tpllama.checkpoint.rotary_rows import is_rotated
from tpllama.config import UserError


@dataclass(frozen=True)
class AdapterTensor:
    """One tensor of an adapter.

    weight: Hugging Face's name of the base tensor that it acts on.
    part: a factor of the weight's change, or `whole` for a tensor that replaces the base's.
    transposed: the factors give the transposed change, as PEFT's do for embeddings.
    interleaved: B's rows are in Meta's order of rotated rows.
    """

    weight: str
    part: Literal["A", "B", "whole"]
    transposed: bool = False
    interleaved: bool = False


# torchtune's modules by Meta's, where the two differ.
_TORCHTUNE_MODULES = {
    "attn.q_proj": "attention.wq",
    "attn.k_proj": "attention.wk",
    "attn.v_proj": "attention.wv",
    "attn.output_proj": "attention.wo",
    "mlp.w1": "feed_forward.w1",
    "mlp.w2": "feed_forward.w2",
    "mlp.w3": "feed_forward.w3",
}
_PEFT_LORA = re.compile(
    r"(?P<module>[\w.]+)\.lora_(?:(?P<linear>[AB])(?:\.default)?\.weight|embedding_(?P<embedding>[AB])(?:\.default)?)"
)
# PEFT writes base_layer where it saves an embedding or a head along with its LoRA.
_PEFT_WHOLE = re.compile(
    r"(?P<module>(?:model\.[\w.]+?|lm_head))(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.(?P<kind>weight|bias)"
)
_META_LORA = re.compile(r"(?P<layer>layers\.\d+\.)?(?P<module>[\w.]+)\.lora_(?P<part>[ab])\.weight")


def parse_adapter_name(name: str) -> AdapterTensor:
    """What the tensor `name` of an adapter's file is. Raises UserError for what no plain LoRA of a Llama has."""
    if "magnitude" in name:
        raise UserError(f"found DoRA's tensor {name}, expected plain LoRA, merge the adapter with PEFT and save that")
    if re.search(r"\.lora_[AaBb](\.default)?\.bias$", name):
        raise UserError(f"found a LoRA bias {name}, expected weights alone, merge the adapter with PEFT and save that")
    tensor = _from_peft(name.removeprefix("base_model.model.")) or _from_meta(name)
    if tensor is None:
        raise UserError(
            f"found tensor {name}, expected the LoRA tensors of a Llama as PEFT, torchtune or Meta spells them, "
            f"merge the adapter with the program that wrote it and save that"
        )
    return tensor


def _from_peft(name: str) -> AdapterTensor | None:
    lora = _PEFT_LORA.fullmatch(name)
    if lora:
        part: Literal["A", "B"] = "A" if "A" in (lora["linear"], lora["embedding"]) else "B"
        return AdapterTensor(f"{lora['module']}.weight", part, transposed=lora["embedding"] is not None)
    whole = None if "lora_" in name else _PEFT_WHOLE.fullmatch(name)
    return AdapterTensor(f"{whole['module']}.{whole['kind']}", "whole") if whole else None


def _from_meta(name: str) -> AdapterTensor | None:
    lora = _META_LORA.fullmatch(name)
    if lora is None:
        return None
    module = _TORCHTUNE_MODULES.get(lora["module"], lora["module"])
    weight = from_meta(f"{lora['layer'] or ''}{module}.weight")
    if weight is None:
        return None
    return AdapterTensor(weight, "A" if lora["part"] == "a" else "B", interleaved=is_rotated(weight))
