"""GGUF's container: typed metadata and a memory-mapped table of tensors.

Owns making the gguf package's reader fast and its failures one-line. Knows nothing of Llamas.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderField

from tpllama.checkpoint.open import first_line
from tpllama.config import UserError

_LENGTH = struct.Struct("=Q")


class MappedReader(GGUFReader):  # type: ignore[misc]
    """The package's reader, with each metadata array as one view of the file.

    The package makes several objects per element: 1.7 s for a vocabulary of 49k tokens. Every rank
    opens the file, and only the tokenizer looks at these arrays.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray[Any, Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            parts: tuple[int, list[np.ndarray[Any, Any]], list[int], list[GGUFValueType]]
            parts = super()._get_field_parts(orig_offs, raw_type)
            return parts
        if self.byte_order != "I":
            raise ValueError("byte order of another kind of machine")
        kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if kind == GGUFValueType.STRING:
            end = self._end_of_strings(start, count)
        elif kind in self.gguf_scalar_to_np:
            end = start + count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        else:
            raise ValueError(f"metadata array of {kind.name}")
        if end > len(self.data):
            raise ValueError("metadata array past the end of the file")
        return end - orig_offs, [self.data[start:end]], [0], [GGUFValueType.ARRAY, kind]

    def _end_of_strings(self, start: int, count: int) -> int:
        buffer, at = memoryview(self.data), start
        for _ in range(count):
            at += 8 + _LENGTH.unpack_from(buffer, at)[0]
        return at

    def value(self, name: str) -> Any:
        """A metadata value as Python's or, an array of numbers, numpy's; None where there is none."""
        field: ReaderField | None = self.fields.get(name)
        if field is None:
            return None
        if field.types[0] == GGUFValueType.STRING:
            return field.parts[-1].tobytes().decode("utf-8", errors="replace")
        if field.types[0] != GGUFValueType.ARRAY:
            return field.contents()
        kind, data = field.types[-1], field.parts[-1]
        return _strings(data) if kind == GGUFValueType.STRING else data.view(self.gguf_scalar_to_np[kind])


def open_gguf(path: Path) -> MappedReader:
    """Reads the header of `path`, and checks that all tensors lie inside the file. Raises UserError."""
    try:
        reader = MappedReader(path)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, struct.error) as error:
        raise UserError(
            f"found a damaged or unknown GGUF file {path} ({type(error).__name__}: {first_line(error)}), "
            f"expected a complete GGUF file of version 2 or 3, download it again"
        ) from error
    except OSError as error:
        raise UserError(
            f"found {path} unreadable ({error.strerror}), expected a GGUF file, check its permissions"
        ) from error
    return reader


def _strings(data: np.ndarray[Any, Any]) -> list[str]:
    buffer, at, strings = data.tobytes(), 0, []
    while at < len(buffer):
        start = at + 8
        at = start + _LENGTH.unpack_from(buffer, at)[0]
        strings.append(buffer[start:at].decode("utf-8", errors="replace"))
    return strings
