"""bench/compare.py takes turns, divides rightly and survives its peers. The peers, and tpllama, are tiny fakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

# Says who was called and, call by call, the next of its speeds; decode is ten times as fast as prefill.
FAKE = """
import json, pathlib, sys
folder = pathlib.Path(__file__).parent
def listed(flag):
    rest = sys.argv[sys.argv.index(flag) + 1:] if flag in sys.argv else []
    ends = [place for place, word in enumerate(rest) if word.startswith("--")]
    return rest[:ends[0]] if ends else rest
def turn(name):
    with (folder / "turns").open("a") as file:
        file.write(name + "\\n")
    return (folder / "turns").read_text().split("\\n").count(name) - 1
"""
WORKER = """
if "--prepare" in sys.argv:
    sys.exit()
number, precision = turn(NAME), listed("--precision")[0]
print("a line of some library")
for recipe, speeds in SPEEDS.items():
    shapes = [("prefill", 1, int(length)) for length in listed("--prefill")]
    shapes += [("decode", int(batch), int(listed("--prompt-len")[0])) for batch in listed("--decode")]
    for kind, batch, length in shapes:
        speed = speeds[number] * (10 if kind == "decode" else 1)
        line = {"peer": NAME, "version": "1", "precision": precision, "recipe": recipe, "kind": kind, "batch": batch,
                "length": length, "tokens_per_s": speed, "median_s": 1.0, "head_quantized": "head" in recipe}
        print(json.dumps(line), flush=True)
"""
LATENCY = """
recipe, head, tp = listed("--torchao-config")[0], "--quantize-lm-head" in sys.argv, listed("--tp")[0]
name = recipe + "+head" * head + "@" + tp
decodes = listed("--output-len") != ["1"]
number = turn("tpllama " + name + " decode" * decodes)
with open(listed("--result-filename")[0], "a") as file:
    for batch in listed("--batch-size"):
        for length in listed("--input-len"):
            speed = SPEEDS[name][number]
            line = {"batch_size": int(batch), "input_len": int(length), "prefill_throughput": speed,
                    "median_decode_throughput": 10 * speed if decodes else None}
            file.write(json.dumps(line) + "\\n")
"""
Speeds = dict[str, list[float]]


@dataclass
class Bench:
    """A folder with fake peers, and a fake latency.py beside them."""

    folder: Path

    def __post_init__(self) -> None:
        (self.folder / "config.json").write_text("{}")

    def peer(self, name: str, speeds: Speeds, worker: str = WORKER, is_set_up: bool = True) -> None:
        script = f"{FAKE}\nNAME, SPEEDS = {name!r}, {speeds!r}\n{worker}"
        (self.folder / f"measure_{name}.py").write_text(script)
        if is_set_up:
            python = self.folder / name / "venv/bin/python"
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)
            (self.folder / name / "ready").write_text("version 1\n")

    def ours(self, speeds: Speeds) -> None:
        (self.folder / "latency.py").write_text(f"{FAKE}\nSPEEDS = {speeds!r}\n{LATENCY}")

    def run(self, *arguments: str, code: int = 0) -> tuple[str, list[dict[str, Any]]]:
        """What is printed, and the records."""
        result = self.folder / "result.jsonl"
        fakes = ["--workers", str(self.folder), "--latency", str(self.folder / "latency.py")]
        command = [sys.executable, str(ROOT / "bench/compare.py"), *fakes, "--model", str(self.folder)]
        done = subprocess.run(
            [*command, "--result-filename", str(result), *arguments], capture_output=True, text=True, timeout=60,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TPLLAMA_PEERS": str(self.folder)}, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        records = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
        return done.stdout + done.stderr, records

    def turns(self) -> list[str]:
        return (self.folder / "turns").read_text().split("\n")[:-1]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


INT8 = ("--precisions", "int8", "--recipes", "int8dq", "--tp", "1", "--heads", "plain", "--prefill", "128")


def test_contestants_take_turns(bench: Bench) -> None:
    bench.ours({"int8dq@1": [1.0, 1.0]})
    bench.peer("a", {"r": [1.0, 1.0]})
    bench.peer("b", {"r": [1.0, 1.0]})
    bench.run(*INT8, "--decode", "--rounds", "2")
    assert bench.turns() == ["tpllama int8dq@1", "a", "b"] * 2


def test_ratios_and_their_spread(bench: Bench) -> None:
    bench.ours({"int8dq@1": [10.0, 20.0, 30.0], "int8dq@2": [1.0, 1.0, 99.0]})
    bench.peer("a", {"slow": [1.0, 1.0, 1.0], "fast": [4.0, 5.0, 20.0]})
    said, records = bench.run(*INT8, "--tp", "1", "2", "--decode", "8", "--prompt-len", "16")
    ratios = [record for record in records if record["what"] == "ratio"]
    assert [(ratio["kind"], ratio["batch"], ratio["length"]) for ratio in ratios] == [
        ("prefill", 1, 128), ("decode", 8, 16),
    ]  # fmt: skip
    for ratio in ratios:
        assert (ratio["peer"], ratio["ours"], ratio["theirs"]) == ("a", "int8dq, TP 1 x 2", "fast")
        assert [ratio[name] for name in ("median", "least", "most")] == pytest.approx([2.5, 1.5, 4.0])
    measurements = [record for record in records if record["what"] == "measurement"]
    assert len(measurements) == 3 * (2 + 2) * 2
    speeds = [each["tokens_per_s"] for each in measurements if (each["recipe"], each["kind"]) == ("fast", "decode")]
    assert speeds == [40.0, 50.0, 200.0]
    assert {"date", "cpu", "versions", "model", "threads", "started"} <= set(records[0])
    row = next(line for line in said.splitlines() if line.startswith("int8 decode x8"))
    assert row.split(maxsplit=3) == ["int8", "decode", "x8", "200.0    50.0: 2.50 (1.50 to 4.00)"]


def test_heads_are_compared_with_their_like(bench: Bench) -> None:
    bench.ours({"int8dq@1": [10.0], "int8dq+head@1": [12.0]})
    bench.peer("plain", {"r": [5.0]})
    bench.peer("quantized", {"r, head too": [6.0]})
    _, records = bench.run(*INT8, "--heads", "plain", "quantized", "--decode", "--rounds", "1")
    ours = {record["peer"]: (record["ours"], record["median"]) for record in records if record["what"] == "ratio"}
    assert ours == {"plain": ("int8dq, TP 1 x 2", 2.0), "quantized": ("int8dq + head, TP 1 x 2", 2.0)}


def test_who_is_absent_is_skipped_by_name(bench: Bench) -> None:
    bench.ours({"int8dq@1": [1.0]})
    bench.peer("here", {"r": [2.0]})
    bench.peer("absent", {}, is_set_up=False)
    said, records = bench.run(*INT8, "--decode", "--rounds", "1")
    assert "skipped absent: not set up, run bench/peers/setup_absent.sh" in said
    assert records[0]["skipped"] == {"absent": "not set up, run bench/peers/setup_absent.sh"}
    assert [record["peer"] for record in records if record["what"] == "ratio"] == ["here"]
    listed, _ = bench.run("--list")
    assert "here: version 1" in listed
    assert "absent: not set up" in listed


def test_a_peer_that_crashes_is_recorded_with_its_reason(bench: Bench) -> None:
    bench.ours({"int8dq@1": [1.0, 1.0]})
    bench.peer("crashes", {}, "'--prepare' in sys.argv or turn('crashes') or sys.exit('out of luck')")
    bench.peer("hangs", {}, "import time\nif '--prepare' not in sys.argv:\n    turn('hangs')\n    time.sleep(99)")
    bench.peer("refuses", {}, "print(json.dumps({'peer': 'refuses', 'recipe': 'r', 'error': 'no such kernel'}))")
    bench.peer("works", {"r": [2.0, 4.0]})
    said, records = bench.run(*INT8, "--decode", "--rounds", "2", "--timeout-s", "1.5")
    out = {record["contestant"]: record["error"] for record in records if record["what"] == "out"}
    assert out == {
        "crashes": "exit code 1: out of luck", "hangs": "no end within 1.5 s", "refuses": "no such kernel",
    }  # fmt: skip
    assert all(f"skipped {name} at int8: {reason}" in said for name, reason in out.items())
    assert bench.turns() == ["tpllama int8dq@1", "crashes", "hangs", "works", "tpllama int8dq@1", "works"]
    (ratio,) = (record for record in records if record["what"] == "ratio")
    assert (ratio["peer"], ratio["median"], ratio["least"], ratio["most"]) == ("works", 0.375, 0.25, 0.5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--peers", "nobody"), "found --peers nobody, expected some of a, see --list"),
        (("--prefill", "--decode"), "found neither --prefill nor --decode"),
        (("--decode", "0"), "found '0', expected whole numbers"),
        (("--new-tokens", "1"), "found --new-tokens 1, expected at least 2"),
        (("--tp", "3"), "found --tp 3 on 2 threads, expected a divisor"),
        (("--recipes", "int3"), "found --recipes int3, expected some of none, int8dq"),
        (("--model", "/nowhere"), "found no config.json in --model /nowhere"),
        (("--result-filename", "/nowhere/result"), "found --result-filename /nowhere/result"),
    ],
)
def test_bad_input_is_one_line(bench: Bench, arguments: tuple[str, ...], reason: str) -> None:
    bench.ours({})
    bench.peer("a", {})
    said, records = bench.run(*arguments, code=2)
    assert said.startswith("compare: error: ")
    assert said.count("\n") == 1
    assert reason in said
    assert not records
