"""Matrices cut into tiles, which lie at the same places whatever slice is asked for.

Owns how large tiles are and where a slice touches them; what is computed tile by tile is its callers' concern.
"""

from __future__ import annotations

from collections.abc import Iterator

# Rows and columns. Dummy weights' values and the last bits of merged adapters depend on it.
TILE = (256, 1024)
Corner = tuple[int, int]
Part = tuple[slice, slice]


def tiles(rows: slice, columns: slice) -> Iterator[tuple[Corner, Part, Part]]:
    """The tiles that rows x columns touch: their corner, and the overlap, within the tile and within the slice."""
    for top in range(rows.start // TILE[0] * TILE[0], rows.stop, TILE[0]):
        for left in range(columns.start // TILE[1] * TILE[1], columns.stop, TILE[1]):
            in_rows, to_rows = _overlap(rows, top, TILE[0])
            in_columns, to_columns = _overlap(columns, left, TILE[1])
            yield (top, left), (in_rows, in_columns), (to_rows, to_columns)


def _overlap(wanted: slice, start: int, size: int) -> Part:
    """Where a tile at `start` and `wanted` overlap: within the tile, and within the slice."""
    first, last = max(wanted.start, start), min(wanted.stop, start + size)
    return slice(first - start, last - start), slice(first - wanted.start, last - wanted.start)
