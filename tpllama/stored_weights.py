"""Weights that lie in a checkpoint quantized: what form each of them has, and the tensors as if they did not.

Part of the composition root (see `build.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from tpllama.checkpoint.open import Checkpoint, TensorInfo, names_of_parts
from tpllama.quantization.stored import StoredForm, recognize


def stored_forms(checkpoint: Checkpoint) -> dict[str, StoredForm]:
    """The recipe and shape of each weight that lies in the files quantized."""
    forms = {}
    for name, weight in checkpoint.quantized.items():
        parts = {part: checkpoint.tensors[tensor] for part, tensor in weight.parts.items()}
        shapes = {part: info.shape for part, info in parts.items()}
        dtypes = {part: info.dtype for part, info in parts.items()}
        forms[name] = recognize(name, weight.kind, weight.attributes, shapes, dtypes)
    return forms


def whole_tensors(checkpoint: Checkpoint, stored: Mapping[str, StoredForm]) -> dict[str, TensorInfo]:
    """The checkpoint's tensors, where those that are the parts of a quantized weight are seen as the weight."""
    parts = names_of_parts(checkpoint.quantized)
    plain = {name: info for name, info in checkpoint.tensors.items() if name not in parts}
    return plain | {name: TensorInfo(form.shape) for name, form in stored.items()}
