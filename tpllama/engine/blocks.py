"""Which blocks of the cache belong to whom. Plain Python, no torch: blocks are numbers here.

A block keeps the keys and values of `block_size` consecutive tokens of a sequence. It may belong to several
sequences that begin alike, and when it belongs to none, what it holds is kept for the next that begins so, until
the place is needed. A sequence gets neighbouring blocks where there are some, as attention reads those
without a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from hashlib import blake2b

# Neighbouring blocks kept free beyond what a sequence needs now, as long as nobody else needs them.
_ROOM_TO_GROW = 16


class BlockTable:
    """The blocks of one sequence in the order of its tokens.

    `runs` says the same in fewer numbers: (first block, how many follow each other). `kept` counts the first blocks
    whose content was noted. `promised`, a bit mask: free blocks next to its last one.
    """

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self.blocks: list[int] = []
        self.runs: list[tuple[int, int]] = []
        self.kept = 0
        self.promised = 0
        for block in blocks:
            self.append(block)

    def append(self, block: int) -> None:
        self.blocks.append(block)
        first, count = self.runs[-1] if self.runs else (block, 0)
        if self.runs and first + count == block:
            self.runs[-1] = (first, count + 1)
        else:
            self.runs.append((block, 1))

    def replace_last(self, block: int) -> None:
        """Puts another block in the place of the last one."""
        self.blocks.pop()
        first, count = self.runs.pop()
        if count > 1:
            self.runs.append((first, count - 1))
        self.append(block)


class BlockPool:
    """`size` blocks of `block_size` tokens.

    Only the first `warm` ones are used as long as they suffice for the running sequences, so that memory which
    was never touched isn't touched for what is merely kept.
    """

    def __init__(self, size: int, block_size: int, warm: int | None = None) -> None:
        self.size = size
        self.block_size = block_size
        self._references = [0] * size
        self._in_play = min(size, size if warm is None else max(warm, 1))
        self._free = (1 << self._in_play) - 1  # a bit for each block in play that holds nothing
        self._promised = 0
        self._kept: dict[int, None] = {}  # hold what nobody uses now, least recently used first
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated."""
        return self._free.bit_count() + len(self._kept) + self.size - self._in_play

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.size - self.num_available

    def blocks_for(self, tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-tokens // self.block_size)

    def grow(self, table: BlockTable, count: int, most: int) -> bool:
        """Appends `count` blocks to a table that may come to need `most` in all; or none, if so many aren't there."""
        if count > self.num_available:
            return False
        while count and table.blocks and self._is_open(table, table.blocks[-1] + 1):
            self._take(table, table.blocks[-1] + 1)
            count -= 1
        if count:
            self._place(table, count, min(count + _ROOM_TO_GROW, max(most - len(table.blocks), count)))
        return True

    def _is_open(self, table: BlockTable, block: int) -> bool:
        unpromised = self._free & ~(self._promised & ~table.promised)
        return bool(unpromised >> block & 1) or (not unpromised and block in self._kept)

    def _place(self, table: BlockTable, count: int, wished: int) -> None:
        self._make_room(count)
        self._promised &= ~table.promised
        unpromised = self._free & ~self._promised
        start = _first_run(unpromised, wished)
        if start >= 0:
            table.promised = ((1 << wished) - 1) << start
            self._promised |= table.promised
        else:
            table.promised = 0
            start = _first_run(unpromised, count)
        if start < 0:
            start = _first_run(self._free, count)
        for offset in range(count):
            self._take(table, start + offset if start >= 0 else _lowest(unpromised & self._free or self._free))

    def _make_room(self, count: int) -> None:
        """Forgets what was kept longest, and takes more blocks into play where that isn't enough for `count`."""
        short = count - (self._free & ~self._promised).bit_count()
        for block in list(itertools.islice(self._kept, max(short, 0))):
            self._forget(block)
            del self._kept[block]
            self._free |= 1 << block
        while self._free.bit_count() < count:
            self._free |= 1 << self._in_play
            self._in_play += 1

    def _take(self, table: BlockTable, block: int) -> None:
        if block in self._kept:
            del self._kept[block]
            self._forget(block)
        self._free &= ~(1 << block)
        self._references[block] = 1
        table.append(block)

    def _forget(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]

    def fork(self, table: BlockTable) -> BlockTable:
        """A table of the same blocks."""
        twin = BlockTable(table.blocks)
        twin.kept = table.kept
        self._share(table.blocks)
        return twin

    def _share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._references[block] += 1
            self._kept.pop(block, None)

    def is_last_shared(self, table: BlockTable) -> bool:
        """Whether a table's last block is another's, too: it must not be written then."""
        return self._references[table.blocks[-1]] > 1

    def own_last(self, table: BlockTable) -> tuple[int, int] | None:
        """Replaces a table's shared last block by an own one: (shared, own), to be copied; None if none is left."""
        own = BlockTable()
        if not self.grow(own, 1, 1):
            return None
        self._promised &= ~own.promised
        shared = table.blocks[-1]
        self._references[shared] -= 1
        table.replace_last(own.blocks[0])
        return shared, own.blocks[0]

    def release(self, table: BlockTable) -> BlockTable:
        """Takes a table's blocks back, its last ones to be used first; an empty table in its place."""
        for block in reversed(table.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._digest_of:
                    self._kept[block] = None
                else:
                    self._free |= 1 << block
        self._promised &= ~table.promised
        return BlockTable()

    def find(self, digests: Sequence[bytes]) -> BlockTable:
        """A table of the blocks that hold the beginning of a sequence, as far as they are there."""
        found = list(itertools.takewhile(lambda block: block is not None, map(self._block_of.get, digests)))
        table = BlockTable(found)  # type: ignore[arg-type]
        table.kept = len(found)
        self._share(table.blocks)
        return table

    def keep(self, table: BlockTable, digests: Sequence[bytes]) -> None:
        """Notes what a table's first blocks hold, of which all are full: so that others find it."""
        for block, digest in zip(table.blocks[table.kept :], digests[table.kept :], strict=False):
            if digest not in self._block_of and block not in self._digest_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest
        table.kept = max(table.kept, len(digests))

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Asserts that each block is where it must be, given the tables of all sequences."""
        counts = [0] * self.size
        for table in tables:
            for block in table.blocks:
                counts[block] += 1
            assert [block for first, count in table.runs for block in range(first, first + count)] == table.blocks
        assert counts == self._references
        for block, count in enumerate(counts):
            places = [bool(count), bool(self._free >> block & 1), block in self._kept, block >= self._in_play]
            assert sum(places) == 1, (block, places)
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of
        assert all(block in self._digest_of for block in self._kept)


def digests_of(tokens: Sequence[int], block_size: int, seed: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """A digest for each full block of `tokens`, of all tokens up to its end; `known`: those of the first ones."""
    digests = list(known)
    for start in range(len(digests) * block_size, len(tokens) - block_size + 1, block_size):
        content = ",".join(map(str, tokens[start : start + block_size]))
        last = digests[-1] if digests else seed
        digests.append(blake2b(content.encode(), key=last, digest_size=16).digest())
    return digests


def _lowest(mask: int) -> int:
    """The place of the lowest bit, -1 if there is none."""
    return (mask & -mask).bit_length() - 1


def _first_run(mask: int, length: int) -> int:
    """Where the first `length` set bits in a row begin, -1 if nowhere."""
    width = 1
    while width < length:
        step = min(width, length - width)
        mask &= mask >> step
        width += step
    return _lowest(mask)
