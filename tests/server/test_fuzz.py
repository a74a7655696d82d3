"""Requests that the schema allows, and that it doesn't: no answer is a 5xx, nothing hangs, and nothing is left over."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .serving import ServerProcess

# Answers that say that something is missing are no fault: 503 is what loading a model that was made up may get.
CHECKS = "not_a_server_error,content_type_conformance"


@pytest.mark.slow
def test_a_few_thousand_requests_of_the_schema(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    examples = os.environ.get("TPLLAMA_FUZZ_EXAMPLES", "25")  # of each route, beside those for each field
    with ServerProcess("--model", "smollm2", "--max-seq-len", "64") as server, server.client() as client:
        server.wait_until_ready()
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", CHECKS]
        command += ["--max-examples", examples, "--request-timeout", "20", "--exclude-path-regex", "unload"]
        command += ["--exclude-method", "DELETE", "--continue-on-failure", "--no-color", "--seed", "1"]
        path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
        hooks = {"SCHEMATHESIS_HOOKS": "fuzz_hooks", "PYTHONPATH": path}
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | hooks, timeout=900, check=False
        )
        assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
        metrics = ""
        deadline = time.monotonic() + 10
        idle = [f'tpllama_{name}{{model="smollm2"}} 0.0' for name in ("running", "waiting", "cache_used_blocks")]
        while not all(line in metrics for line in idle):
            assert time.monotonic() < deadline, metrics
            metrics = client.get("/metrics").text
        counted = sum(float(value) for value in re.findall(r"^tpllama_requests_total\{.*\} (\S+)$", metrics, re.M))
        assert counted > 500
        assert client.get("/health").status_code == 200
        assert not [line for line in server.lines if "failed" in line], server.lines
