"""The server as a process: socket, signals, the model to begin with, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from tpllama.config import EngineConfig, UserError
from tpllama.server.app import make_app
from tpllama.server.checking import Checker
from tpllama.server.connections import PatientProtocol
from tpllama.server.errors import ApiError
from tpllama.server.gate import Gate
from tpllama.server.locate import Roots
from tpllama.server.metrics import Metrics
from tpllama.server.models import Models
from tpllama.server.ranks import ModelRanks
from tpllama.server.registry import Registry
from tpllama.server.run_config import RunConfig
from tpllama.server.seat import Seat
from tpllama.server.service import Service, ServiceLimits
from tpllama.server.switch import Switch

# For answers that are under way when all requests have ended.
_LAST_BYTES_WITHIN_S = 3.0
_BACKLOG = 2048


@dataclass
class Serving:
    """One server. `engine`: EngineConfig's fields for all models; trusted: models named on the command line."""

    config: RunConfig
    engine: Mapping[str, Any]
    trusted: frozenset[str]
    ranks: ModelRanks
    say: Callable[[str], None]
    is_debug: bool = False
    exit_code: int = 0

    async def run(self) -> int:
        """Serves until told to stop; the process's exit code. Raises UserError for what can't work."""
        config = self.config
        registry, metrics = Registry(config.state_file), Metrics()
        checker = Checker(Roots(tuple(config.model_roots), config.allow_hub), self.engine, self.trusted)
        models = Models(registry, checker)
        first = await asyncio.to_thread(models.restore, config.models)
        switch = Switch(registry, Seat(self.ranks, metrics, self.say, self._give_up), models.check)
        models.switch = switch
        metrics.watch(switch)
        service = Service(switch, metrics, self._limits())
        app = make_app(service, models, switch, metrics, self._report)
        server = _server(Gate(app, config.api_key, config.max_request_bytes))
        listener = _listen(config.host, config.port)
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, stopping)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        host, port = listener.getsockname()[:2]
        self.say(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}")
        if config.api_key is None and not ipaddress.ip_address(host.split("%")[0]).is_loopback:
            self.say("whoever reaches this host may use the server: --api-key asks for a key")
        loading = asyncio.create_task(self._load_first(switch, first, stopping))
        await asyncio.wait([serving, asyncio.create_task(stopping.wait())], return_when=asyncio.FIRST_COMPLETED)
        service.is_closing = server.should_exit = True
        # What failed is not worth waiting for: who watches this process starts it again.
        await switch.close(config.shutdown_timeout_s if switch.seat.failure is None else 0)
        loading.cancel()
        await asyncio.wait([serving], timeout=_LAST_BYTES_WITHIN_S)
        return self.exit_code or int(switch.seat.failure is not None)

    def _limits(self) -> ServiceLimits:
        batch = self.engine.get("max_batch_size", EngineConfig.max_batch_size)
        config = self.config
        most = batch + config.max_waiting
        return ServiceLimits(most, config.max_texts, config.request_timeout_s, config.on_demand)

    async def _load_first(self, switch: Switch, first: str | None, stopping: asyncio.Event) -> None:
        """A server of one model that can't be loaded has nothing to do."""
        if first is None:
            return
        try:
            await switch.load(first)
        except ApiError as error:
            if first in self.trusted and not stopping.is_set():
                self.exit_code = 2 if error.status == 400 else 1
                self.say(f"error: {error.message}")
                stopping.set()

    def _stop(self, stopping: asyncio.Event) -> None:
        """On a signal. A second one doesn't wait for requests."""
        if stopping.is_set():
            os._exit(1)
        stopping.set()

    def _give_up(self, reason: str) -> None:
        """Nothing here can go on. Answers that say so get their time to be sent."""
        self.say(f"error: {reason}")
        asyncio.get_running_loop().call_later(1, os._exit, 1)

    def _report(self, error: Exception) -> None:
        """For the operator, without what a request said."""
        if self.is_debug:
            self.say("".join(traceback.format_exception(error)).rstrip())
            return
        frames = traceback.extract_tb(error.__traceback__)
        where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        self.say(f"a request failed by {type(error).__name__}{where} (--debug shows more)")


class _Uvicorn(uvicorn.Server):
    """Without handlers of signals: they are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: Gate) -> uvicorn.Server:
    options = {"log_config": None, "access_log": False, "server_header": False, "proxy_headers": False}
    return _Uvicorn(uvicorn.Config(app, http=PatientProtocol, ws="none", lifespan="off", **options))  # type: ignore[arg-type]


def _listen(host: str, port: int) -> socket.socket:
    """Raises UserError where it can't be listened."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        # The protocol by name: only then does asyncio turn off Nagle's algorithm, which holds back small answers.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        return listener
    except (OSError, OverflowError) as error:
        raise UserError(
            f"found {host}:{port} that can't be listened on ({error}), expected a free port of this host, "
            f"give another --host or --port"
        ) from None


def run(serving: Serving) -> int:
    """Serves until told to stop."""
    sys.setswitchinterval(0.002)  # the event loop gets its turn soon while the model's thread computes
    return asyncio.run(serving.run())
