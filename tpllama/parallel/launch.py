"""Starting the other ranks from the first: one child process per follower, tied to this one's life.

A follower reads its orders, one JSON line, from its standard input and then keeps the pipe open: its end
means that the leader is gone. On failure it writes one JSON line to its standard output. Imports no torch,
so that followers start while the leader is still importing it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLLOWER_MODULE = "tpllama.follow"


@dataclass(frozen=True)
class Death:
    """A follower that ended by itself: its rank, how, and what it said."""

    rank: int
    returncode: int
    message: str | None
    user_error: bool

    def describe(self) -> str:
        if self.message is not None:
            return self.message if self.user_error else f"rank {self.rank} failed: {self.message}"
        if self.returncode < 0:
            name = signal.Signals(-self.returncode).name
            hint = " (out of memory, or killed from outside)" if -self.returncode == signal.SIGKILL else ""
            return f"rank {self.rank} was ended by {name}{hint}"
        return f"rank {self.rank} ended with exit code {self.returncode}"


class Followers:
    """The child processes of ranks 1 .. tp - 1. Must be closed; a context manager."""

    def __init__(self, tp: int, orders: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=max(16, tp))
        self.port: int = self.listener.getsockname()[1]
        self._closing = False
        self._deaths: list[Death] = []
        self._changed = threading.Condition()
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(1, tp):
                process = self._start(rank, tp, orders, environ)
                self._processes.append(process)
                threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        except BaseException:
            self.close()
            raise

    def _start(
        self, rank: int, tp: int, orders: Mapping[str, Any], environ: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        # This very package, and no module of the directory that happens to be the current one (-P).
        paths = (str(Path(__file__).parents[2]), environ.get("PYTHONPATH", ""))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", FOLLOWER_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(environ) | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
            process_group=0,  # a Ctrl-C at the terminal is the leader's to handle
        )
        assert process.stdin is not None
        place = {"rank": rank, "size": tp, "local_rank": rank, "local_size": tp, "port": self.port}
        with contextlib.suppress(BrokenPipeError):  # it has died already: its watcher will tell
            process.stdin.write(json.dumps({"place": place, **orders}) + "\n")
            process.stdin.flush()
        return process

    def _watch(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        report: dict[str, Any] = {}
        for line in process.stdout:  # until the follower ends
            if line.startswith('{"tpllama_error"'):
                with contextlib.suppress(ValueError):  # a line that its writer's death cut off
                    report = json.loads(line)
        code = process.wait()
        with self._changed:
            if not self._closing:
                death = Death(rank, code, report.get("tpllama_error"), bool(report.get("user_error")))
                self._deaths.append(death)
            self._changed.notify_all()

    def first_death(self, within_s: float = 0.0) -> Death | None:
        """The follower whose end explains the others', waiting up to `within_s` for one to end."""
        deadline = time.monotonic() + within_s
        with self._changed:
            while not self._deaths and (rest := deadline - time.monotonic()) > 0:
                self._changed.wait(rest)
            if not self._deaths:
                return None
            # A rank that only lost another says nothing; a signal or a message is the cause.
            explains = [death for death in self._deaths if death.message is not None or death.returncode < 0]
            return (explains or self._deaths)[0]

    def on_death(self, call: Callable[[Death], None], grace_s: float) -> None:
        """Calls `call` from a thread if a follower has ended and `grace_s` later this run still goes on."""

        def wait() -> None:
            with self._changed:
                while not self._deaths and not self._closing:
                    self._changed.wait()
            time.sleep(0 if self._closing else grace_s)
            death = self.first_death()
            if death is not None and not self._closing:
                call(death)

        threading.Thread(target=wait, daemon=True).start()

    def close(self, patience_s: float = 5.0) -> None:
        """Ends every follower: by closing its lifeline, then by force."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.listener.close()
        for process in self._processes:
            if process.stdin is not None and not process.stdin.closed:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Followers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def die_with_leader() -> None:
    """In a follower: ends the process, at once, when the leader's end of standard input closes."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def report_failure(message: str | None, user_error: bool) -> None:
    """In a follower: tells the leader why this rank ends."""
    line = json.dumps({"tpllama_error": message, "user_error": user_error})
    os.write(1, (line + "\n").encode())
