"""Our few lines of C++: compiled once, on first use, by whatever compiler the machine has, and called through ctypes.

The sources include no header of torch's, so that they compile in a second or two; instruction sets are chosen at run
time, function by function. Where there is no compiler the callers have a way without, and say so.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=off")
_TIMEOUT_S = 120


@functools.cache
def library(source: Path) -> ctypes.CDLL | str:
    """The compiled `source`, or why there is none, in words.

    Compiled into ~/.cache/tpllama (or $TPLLAMA_CACHE) under a name made of all that it depends on. TPLLAMA_NATIVE=0 in
    the environment does without.
    """
    if os.environ.get("TPLLAMA_NATIVE") == "0":
        return "TPLLAMA_NATIVE=0 in the environment"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "c++", "clang++"))), None)
    if compiler is None:
        return "no C++ compiler (for full speed: apt install g++)"
    try:
        return ctypes.CDLL(str(_compiled(source, compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler} could not build {source.name}: {_reason(error)}"


def _compiled(source: Path, compiler: str) -> Path:
    headers = sorted(path for folder in (source.parent, Path(__file__).parent) for path in folder.glob("*.h"))
    texts = [path.read_bytes() for path in (source, *headers)]  # with what it may include
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT_S).stdout
    digest = hashlib.blake2b(b"\0".join([*texts, version, *map(str.encode, _FLAGS)]), digest_size=8).hexdigest()
    folder = Path(os.environ.get("TPLLAMA_CACHE") or "~/.cache/tpllama").expanduser()
    target = folder / f"{source.stem}-{digest}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{target.name}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as building:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank builds, the others wait for it
        if not target.exists():
            made = Path(building) / target.name
            command = [compiler, *_FLAGS, "-o", str(made), str(source)]
            subprocess.run(command, capture_output=True, check=True, timeout=_TIMEOUT_S)
            made.replace(target)  # whole or not at all
    return target


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = [line for line in (said or b"").decode(errors="replace").splitlines() if "error" in line.lower()]
    return (lines or [str(error)])[0][:200]
