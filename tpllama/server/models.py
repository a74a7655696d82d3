"""Models registered, listed, loaded and unregistered: what is behind the routes of /v1/models."""

from __future__ import annotations

import asyncio
from typing import Any

from tpllama.config import UserError
from tpllama.server.checking import Checker, engine_config
from tpllama.server.errors import ApiError
from tpllama.server.registration import Registration
from tpllama.server.registry import Entry, Registry
from tpllama.server.switch import Switch


class Models:
    """The models of a server. Registrations happen one after the other, in the order that they came."""

    switch: Switch  # is given once there is one: it asks `check` before it loads

    def __init__(self, registry: Registry, checker: Checker) -> None:
        self._registry = registry
        self._checker = checker
        self._one_at_a_time = asyncio.Lock()

    async def register(self, registration: Registration) -> Entry:
        """Registers a model, and loads it unless told not to; ready when this returns.

        What says the same as before changes nothing. Where it can't be loaded it isn't registered either.
        """
        async with self._one_at_a_time:
            entry = self._registry.same(registration)
            if entry is not None and entry.registration == registration:
                return entry
            is_new = entry is None
            if entry is None:
                options = await asyncio.to_thread(self._checker.options, registration, self._places())
                entry = Entry(registration, options, is_kept=True)
            entry.registration = registration
            self._registry.add(entry)
            loading = asyncio.create_task(self._load(entry, is_new)) if registration.is_loaded_at_once else None
            await asyncio.sleep(0)  # it is in line now, before the next registration
        if loading is not None:
            await asyncio.shield(loading)
        return entry

    async def _load(self, entry: Entry, is_new: bool) -> None:
        try:
            await self.switch.load(entry.model_id)
        except ApiError:
            if is_new and entry in self._registry.entries():
                self._registry.remove(entry.model_id)
            raise

    async def unregister(self, model_id: str, force: bool) -> None:
        """Forgets a model; its memory is given back when this returns."""
        self._registry.get(model_id)
        self._registry.remove(model_id)
        await asyncio.shield(asyncio.create_task(self.switch.unload(model_id, force)))

    async def load(self, model_id: str) -> Entry:
        """Loads a registered model."""
        entry = self._registry.get(model_id)
        await asyncio.shield(asyncio.create_task(self.switch.load(model_id)))
        return entry

    async def unload(self, model_id: str, force: bool) -> Entry:
        """Gives a model's memory back; it stays registered."""
        entry = self._registry.get(model_id)
        await asyncio.shield(asyncio.create_task(self.switch.unload(model_id, force)))
        return entry

    async def plan(self, model_id: str) -> dict[str, Any]:
        """What each of its layers is or will be, as `tpllama plan --json` says it."""
        entry = self._registry.get(model_id)
        loaded = self.switch.seat.loaded
        if loaded is not None and loaded.entry is entry:
            return await asyncio.to_thread(loaded.llm.blueprint.report)
        return await asyncio.to_thread(_drawn, entry.options)

    def listed(self) -> list[dict[str, Any]]:
        return [entry.as_listed() for entry in self._registry.entries()]

    def get(self, model_id: str) -> dict[str, Any]:
        return self._registry.get(model_id).as_listed()

    def restore(self, registrations: list[Registration]) -> str | None:
        """Takes in the operator's models, then those of the state file; the one to begin with, if any.

        Raises UserError for one of the operator's that can't be. One of the state file's is listed as failed then.
        """
        kept, last_loaded = self._registry.kept()
        entries: dict[str, Entry] = {}
        for registration in registrations:
            try:
                options = self._checker.options(registration, {name: e.options["model"] for name, e in entries.items()})
            except ApiError as error:
                raise UserError(
                    f"found model {registration.model_id} that can't be served, expected one that can: {error.message}"
                ) from None
            entries[registration.model_id] = Entry(registration, options)
        for registration in kept:
            if registration.model_id not in entries:
                places = {name: entry.options.get("model", "") for name, entry in entries.items()}
                entries[registration.model_id] = self._restored(registration, places)
        self._registry.restore(list(entries.values()), last_loaded)
        if last_loaded in entries:
            return last_loaded
        return next((entry.model_id for entry in entries.values() if entry.registration.is_loaded_at_once), None)

    def _restored(self, registration: Registration, places: dict[str, str]) -> Entry:
        try:
            return Entry(registration, self._checker.options(registration, places), is_kept=True)
        except ApiError as error:
            return Entry(registration, {"model": registration.location}, True, state="failed", reason=error.message)

    def check(self, entry: Entry) -> None:
        """Looks once more whether a model can be loaded. In a thread. Raises ApiError."""
        entry.options = self._checker.options(entry.registration, self._places())

    def _places(self) -> dict[str, str]:
        """Where each registered model lies."""
        return {entry.model_id: entry.options["model"] for entry in self._registry.entries()}


def _drawn(options: dict[str, Any]) -> dict[str, Any]:
    from tpllama.checkpoint.open import open_for
    from tpllama.start import draw_blueprint

    engine = engine_config(options)
    return draw_blueprint(engine, open_for(engine)).report()
