"""Whether a checkpoint has the tensors that a model needs, no others, and in their shapes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from tpllama.checkpoint.open import TensorInfo
from tpllama.config import UserError
from tpllama.llama_config import LlamaConfig

# Stored by old checkpoints, computed by everybody.
_KNOWN_BUFFERS = ("rotary_emb.inv_freq",)
# Of a model whose head is tied to its embedding, files may have it or not.
_HEAD = "lm_head.weight"


def check_tensors(
    config: LlamaConfig, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, TensorInfo]
) -> None:
    """Raises UserError naming tensors that are missing, unexpected, or of another shape than the config's."""
    missing = [name for name in expected if name not in found]
    known = {*expected, *([_HEAD] if config.tie_word_embeddings else [])}
    extra = [name for name in found if name not in known and not name.endswith(_KNOWN_BUFFERS)]
    if missing:
        similar = difflib.get_close_matches(missing[0], extra, n=1)
        hint = f" (found {similar[0]})" if similar else ""
        remedy = "complete the checkpoint"
        if missing == [_HEAD]:
            remedy = "or tie it to the embedding: --json-model-override-args '{\"tie_word_embeddings\": true}'"
        raise UserError(f"found no tensor {_some(missing)} in the checkpoint{hint}, expected {len(expected)}, {remedy}")
    if extra:
        raise UserError(
            f"found tensor {_some(extra)} in the checkpoint, which this Llama doesn't have, expected only its "
            f"own, check the config"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise UserError(
                f"found tensor {name} of shape {list(found[name].shape)}, expected {list(shape)} by the config, "
                f"check that config and weights belong together"
            )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
