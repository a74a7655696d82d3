"""bench/in_turns.py runs all its commands to their end, says which failed, and leaves nothing running."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

SCRIPT = Path(__file__).parents[1] / "bench" / "in_turns.py"
COUNT = "import sys, time\nfor i in range(20):\n    time.sleep(0.02)\nprint('counted', i)\nsys.exit(int(sys.argv[1]))\n"
PARENT = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]])\n"


def in_turns(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--seconds", "0.05", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_each_command_ends_and_a_failure_is_said(tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    both = in_turns(f"{script} 0", f"{script} 0")
    assert (both.returncode, both.stdout.count("counted 19")) == (0, 2), both
    one = in_turns(f"{script} 0", f"{script} 3")
    assert (one.returncode, one.stdout.count("counted 19")) == (1, 2), one
    assert f"{script} 3 (exit 3)" in one.stdout


def test_past_the_limit_nothing_is_left(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    found = in_turns("--timeout-s", "3", f"{script} {tmp_path}/one", f"{script} {tmp_path}/two")
    assert (found.returncode, found.stdout.count("(exit -9)")) == (1, 2), found
    left = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])]
    assert not psutil.wait_procs(left, timeout=30)[1]
