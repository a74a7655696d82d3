"""What torchrun's first rank has the others do next, in words, beside any group that they join for it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from tpllama.parallel.hosts import noticing_lost_hosts
from tpllama.parallel.place import Place

_PATIENCE = timedelta(days=7)
_POLL_S = 0.02


class Orders:
    """Orders and reports in torchrun's store, which outlives groups and says when a run was started again."""

    def __init__(self, place: Place) -> None:
        with noticing_lost_hosts(place):
            store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: Store = PrefixStore(f"tpllama orders {attempt}", store)
        self._place = place
        self._count = 0

    def give(self, order: Mapping[str, Any]) -> None:
        """On the leader: what the others do next."""
        self._count += 1
        self._store.set(f"order {self._count}", json.dumps(order))

    def take(self) -> dict[str, Any]:
        """On a follower: waits for the next order."""
        self._count += 1
        while True:
            try:
                return json.loads(self._store.get(f"order {self._count}"))
            except DistStoreError:  # after days without one
                continue

    def report(self, error: str | None) -> None:
        """On a follower: how the order went that it took last."""
        self._store.set(f"report {self._count} {self._place.rank}", json.dumps(error))

    def reports(self, within_s: float | None = None) -> dict[int, str | None]:
        """On the leader: how the last order went on each of the others. None: waits for all of them."""
        keys = {rank: f"report {self._count} {rank}" for rank in range(1, self._place.size)}
        deadline = None if within_s is None else time.monotonic() + within_s
        while not self._store.check(list(keys.values())) and (deadline is None or time.monotonic() < deadline):
            time.sleep(_POLL_S)
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
