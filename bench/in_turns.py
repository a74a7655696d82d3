"""Commands measured at the same time, each stopped while another runs: a machine's phases hit all of them alike.

    python bench/in_turns.py [--seconds 1] [--timeout-s 600] "bench/latency.py .. --tp 1" "bench/latency.py .. --tp 2"

Each argument is a Python script with its arguments. All start together; every --seconds (1) the one that runs is
stopped with its ranks (SIGSTOP) and the next goes on (SIGCONT). Then each one's output is printed. Read medians only: a
step that was stopped halfway counts the wait too, so give each many steps a turn, and more than one turn to a run. Of
reading speeds and totals nothing holds. Exits 1 if a command failed or ran past the limit. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO

import psutil


def family(command: subprocess.Popen[str]) -> list[psutil.Process]:
    """A command and all below it: torchrun's ranks have sessions of their own, so a process group doesn't hold them."""
    try:
        first = psutil.Process(command.pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def signal_all(command: subprocess.Popen[str], number: signal.Signals) -> None:
    for process in family(command) if command.poll() is None else []:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs Python commands in turns of a second.")
    parser.add_argument("commands", nargs="+", metavar='"SCRIPT ARGUMENTS"')
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in arguments.commands]
        return in_turns(arguments.commands, outputs, arguments.seconds, arguments.timeout_s)


def in_turns(texts: list[str], outputs: list[IO[str]], seconds: float, timeout_s: float) -> int:
    commands = [
        subprocess.Popen([sys.executable, *shlex.split(text)], stdout=output, stderr=subprocess.STDOUT, text=True)
        for text, output in zip(texts, outputs, strict=True)
    ]
    end = time.monotonic() + timeout_s
    try:
        while any(command.poll() is None for command in commands) and time.monotonic() < end:
            for running in commands:
                for waiting in commands:
                    if waiting is not running:
                        signal_all(waiting, signal.SIGSTOP)
                signal_all(running, signal.SIGCONT)
                if running.poll() is None:
                    time.sleep(seconds)
    finally:
        for command in commands:
            signal_all(command, signal.SIGKILL)
    for text, output, command in zip(texts, outputs, commands, strict=True):
        output.seek(0)
        print(f"{text} (exit {command.wait()})\n{output.read()}")
    return int(any(command.returncode for command in commands))


if __name__ == "__main__":
    sys.exit(main())
