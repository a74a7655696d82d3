"""A real server in a process of its own, and what is asked of it over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
_SERVING = re.compile(r"serving on (http://\S+)")


class ServerProcess:
    """`tpllama serve` with arguments, on a free port; or the same under a launcher. A context manager."""

    def __init__(
        self, *arguments: str | Path, launcher: tuple[str, ...] = (), env: Mapping[str, str] | None = None
    ) -> None:  # fmt: skip
        command = [sys.executable, *(launcher or ("-m", "tpllama")), "serve", "--port", "0", *map(str, arguments)]
        self.lines: list[str] = []
        self._has_line = threading.Condition()
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=os.environ | (env or {}),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._has_line:
                self.lines.append(line.rstrip("\n"))
                self._has_line.notify_all()
        with self._has_line:
            self.lines.append("(end)")
            self._has_line.notify_all()

    def line(self, pattern: str, after: int = 0, timeout_s: float = 60) -> re.Match[str]:
        """The first line from number `after` on that `pattern` is found in, waiting for it."""
        deadline = time.monotonic() + timeout_s
        with self._has_line:
            while True:
                for line in self.lines[after:]:
                    if found := re.search(pattern, line):
                        return found
                assert "(end)" not in self.lines, self.lines
                assert self._has_line.wait(deadline - time.monotonic()), (pattern, self.lines)

    @property
    def url(self) -> str:
        return self.line(_SERVING.pattern)[1]

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **options)

    def wait_until_ready(self, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        with self.client() as client:
            while client.get("/ready").status_code != 200:
                assert time.monotonic() < deadline, self.lines
                time.sleep(0.05)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def memory_bytes(self) -> int:
        """Resident memory of the server and its ranks."""
        processes = [psutil.Process(self.process.pid), *self.children()]
        return sum(process.memory_info().rss for process in processes)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 40) -> int:
        """The exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        children = self.children() if self.process.poll() is None else []
        self.process.terminate()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        _, alive = psutil.wait_procs(children, timeout=5)
        for process in alive:
            process.kill()


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, without the one that ends it."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def write_run_config(path: Path, text: str) -> Path:
    file = path / "run.yaml"
    file.write_text(text)
    return file
