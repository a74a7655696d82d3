"""What a model answers to the prompts of `--correct`, how it is printed and saved, and how far it may be off."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpllama.config import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from tpllama.engine.tokenizer import Tokenizer

PROMPTS = (
    "The capital of France is",
    "The capital of the United Kindom is",
    "Today is a sunny day and I like",
)


@dataclass(frozen=True)
class Tolerance:
    """largest, rms: in standard deviations of the reference's logits. gap: between tokens that differ. engine: of the
    text's log-probabilities."""

    largest: float
    rms: float
    gap: float
    engine: float


_ROUNDING = {
    "float32": Tolerance(1e-3, 1e-4, 1e-3, 1e-3),
    "float16": Tolerance(0.1, 0.02, 0.1, 0.1),
    "bfloat16": Tolerance(0.8, 0.12, 0.6, 0.6),
}
# Where activations are quantized as they come, a rounding difference flips an integer, by a 127th of a token's largest
# value, and from layer to layer that grows to about what the quantization itself does.
_FLIPS = Tolerance(4.0, 0.45, 3.0, 3.0)


@dataclass
class Answers:
    """What a model gave to each prompt.

    logits: float32 [input + output - 1, vocab], at each token but the last. logprobs: of each output token, from the
    path that generates; None where that isn't another. is_dynamic: activations are quantized as they come. is_plain:
    nothing is quantized or compiled, one rank's CPU has all, and the library's kernels compute it.
    is_cache_quantized: keys and values are, which the engine's path alone has.
    """

    input_ids: list[list[int]]
    output_ids: list[list[int]]
    logits: list[Tensor]
    logprobs: list[list[float]] | None = None
    texts: list[str] = field(default_factory=list)
    is_dynamic: bool = False
    is_plain: bool = False
    is_cache_quantized: bool = False
    tp: int = 1

    def tolerance(self, dtype: str) -> Tolerance:
        """What these may differ by from the reference's."""
        tolerance = _FLIPS if self.is_dynamic else _ROUNDING[dtype]
        if self.is_plain:  # the same kernels in the same order
            tolerance = replace(_ROUNDING["float32"], engine=tolerance.engine)
        return replace(tolerance, engine=_FLIPS.engine) if self.is_cache_quantized else tolerance

    def save(self, path: str) -> None:
        from safetensors.torch import save_file

        words = {"input_ids": json.dumps(self.input_ids), "output_ids": json.dumps(self.output_ids)}
        save_file({f"logits.{number}": logits.contiguous() for number, logits in enumerate(self.logits)}, path, words)

    @classmethod
    def load(cls, path: str) -> Answers:
        """Raises UserError for a file that `save` didn't write."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                words = file.metadata() or {}
                inputs, outputs = (json.loads(words[name]) for name in ("input_ids", "output_ids"))
                return cls(inputs, outputs, [file.get_tensor(f"logits.{number}") for number in range(len(inputs))])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"found {path} without answers ({error}), expected a file of --save-answers") from None

    def show(self, cut_len: int) -> None:
        """Prints them in the layout that SGLang's users know."""
        print(f"\ninput_ids={self.input_ids}\n")
        halves = [logits[min(cut_len, len(ids)) - 1] for logits, ids in zip(self.logits, self.input_ids, strict=True)]
        finals = [logits[len(ids) - 1] for logits, ids in zip(self.logits, self.input_ids, strict=True)]
        for name, rows in (("first half", halves), ("final", finals)):
            for number, row in enumerate(rows):
                print(f"prefill logits ({name}) {number}: {_abridged(row)}")
            print()
        for number, text in enumerate(self.texts):
            print(f"========== Prompt {number} ==========\n{text}\n", flush=True)


def _abridged(row: Tensor) -> str:
    numbers = row.tolist()
    ends = [*numbers[:3], *numbers[-3:]] if len(numbers) > 6 else numbers
    words = [f"{number:.4f}" for number in ends]
    if len(numbers) > 6:
        words.insert(3, "...")
    return f"[{', '.join(words)}], largest {row.max():.4f} of token {row.argmax()}"


def prompts_of(path: str | None, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The prompts' token ids: of a file's lines, or of the three that SGLang's users know."""
    lines: Sequence[str] = PROMPTS
    if path:
        try:
            lines = [line for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"found {path} unreadable ({error}), expected a text file of prompts") from None
    if not lines:
        raise UserError(f"found no prompt in {path}, expected one a line, add some")
    return [_ids(line) or encode(line) for line in lines]


def _ids(line: str) -> list[int] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, list) and value and all(type(each) is int for each in value) else None


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    """A text, or its ids where there is no tokenizer."""
    return tokenizer.decode(ids) if tokenizer.has_text else str(ids)
