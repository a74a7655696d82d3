"""bench/compare.py takes turns, divides rightly and survives its peers. The peers, and tpllama, are tiny fakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path
from typing import Any

import psutil
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
assert listed("--repeat") == (["1"] if decodes else ["3"])
if number >= len(SPEEDS[name]):
    sys.exit("out of luck")
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

    @property
    def result(self) -> Path:
        return self.folder / "result.jsonl"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        fakes = ["--workers", str(self.folder), "--latency", str(self.folder / "latency.py")]
        command = [sys.executable, str(ROOT / "bench/compare.py"), *fakes, "--model", str(self.folder)]
        return subprocess.Popen(
            [*command, "--result-filename", str(self.result), *arguments], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TPLLAMA_PEERS": str(self.folder)},
        )  # fmt: skip

    def run(self, *arguments: str, code: int = 0) -> tuple[str, list[dict[str, Any]]]:
        """What is printed, and the records."""
        process = self.start(*arguments)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == code, said
        return said, [json.loads(line) for line in self.result.read_text().splitlines()] if self.result.exists() else []

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
    said, records = bench.run(*INT8, "--heads", "plain", "quantized", "--decode", "--rounds", "1")
    ours = {record["peer"]: (record["ours"], record["median"]) for record in records if record["what"] == "ratio"}
    assert ours == {"plain": ("int8dq, TP 1 x 2", 2.0), "quantized": ("int8dq + head, TP 1 x 2", 2.0)}
    row = "int8 prefill 128  12.0     5.0: 2.00 (2.00 to 2.00) of 10.0  6.0: 2.00 (2.00 to 2.00)"
    assert row in said  # plain's was not divided into the 12.0


def test_without_a_like_head_nothing_is_divided(bench: Bench) -> None:
    bench.ours({"int8dq@1": [10.0]})
    bench.peer("quantized", {"r, head too": [6.0]})
    said, records = bench.run(*INT8, "--decode", "--rounds", "1")
    assert not [record for record in records if record["what"] == "ratio"]
    assert "tpllama / quantized: nothing of tpllama in all rounds has a head kept like that of r, head too" in said
    assert "int8 prefill 128  10.0     6.0: no like head" in said


def test_a_lucky_round_before_a_crash_does_not_count(bench: Bench) -> None:
    bench.ours({"int8dq@1": [10.0, 10.0], "int8dq@2": [99.0]})
    bench.peer("a", {"lucky": [99.0, 0.0], "steady": [5.0, 5.0]})
    bench.peer("b", {"r": [99.0]})
    said, records = bench.run(*INT8, "--tp", "1", "2", "--decode", "--rounds", "2")
    (ratio,) = (record for record in records if record["what"] == "ratio")
    assert (ratio["peer"], ratio["ours"], ratio["theirs"], ratio["median"]) == ("a", "int8dq, TP 1 x 2", "steady", 2.0)
    assert "99.00   tpllama: int8dq, TP 2 x 1   (1 of 2 rounds, so it doesn't count)" in said
    row = "int8 prefill 128  10.0     5.0: 2.00 (2.00 to 2.00)  (1 of 2 rounds)"
    assert row in said


def test_a_saved_run_prints_its_tables_again(bench: Bench) -> None:
    bench.ours({"int8dq@1": [10.0], "int8dq+head@1": [12.0]})
    bench.peer("plain", {"r": [5.0]})
    bench.peer("absent", {}, is_set_up=False)
    said, records = bench.run(*INT8, "--heads", "plain", "quantized", "--decode", "--rounds", "1")
    table = said[said.index("int8: every recipe") :]
    with bench.result.open("a") as file:
        file.writelines(json.dumps({**record, "started": "later", "skipped": {}}) + "\n" for record in records[:1])
    started = records[0]["started"]
    again, _ = bench.run("--from", str(bench.result), "--started", started)
    assert again == f"{bench.folder} on {records[0]['cpu']}, threads 2, rounds 1, {started}\n{table}"
    last, _ = bench.run("--from", str(bench.result), "--markdown")
    assert "|  | tpllama |\n| --- | ---: |\n| int8 prefill 128 | 10.0 (int8dq, TP 1 x 2) |\n" in last
    markdown, _ = bench.run("--from", str(bench.result), "--started", started, "--markdown")
    cells = "12.0 (int8dq + head, TP 1 x 2) | 5.0: 2.00 (2.00 to 2.00) of 10.0 (int8dq, TP 1 x 2)"
    assert f"|  | tpllama | plain |\n| --- | ---: | ---: |\n| int8 prefill 128 | {cells} |\n" in markdown
    for arguments, reason in (
        (("--started", "never"), f"found runs of {started}, later in {bench.result}, expected never"),
        (("--from", str(bench.folder / "latency.py")), "unreadable"),
    ):
        refused, _ = bench.run("--from", str(bench.result), *arguments, code=2)
        assert reason in refused
        assert refused.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--latency", "/nowhere.py", "--peers"), ("--recipes", "--peers")])
def test_without_any_figure_it_fails(bench: Bench, arguments: tuple[str, ...]) -> None:
    bench.ours({})
    said, _ = bench.run(*INT8, "--decode", *arguments, code=1)
    assert said.splitlines()[-1].startswith("compare: error: nothing was measured, expected")


@pytest.mark.parametrize("is_peer", [False, True])
def test_a_terminated_comparison_leaves_nothing_running(bench: Bench, is_peer: bool) -> None:
    waits = "import os, time\n(folder / 'pid').write_text(str(os.getpid()) + '.')\ntime.sleep(99)"
    (bench.folder / "latency.py").write_text(f"{FAKE}\n{waits}")
    bench.peer("waits", {}, waits)
    process = bench.start(*INT8, "--decode", *(("--recipes",) if is_peer else ("--peers",)))
    pid = bench.folder / "pid"
    while not pid.exists() or not pid.read_text().endswith("."):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert not psutil.pid_exists(int(pid.read_text()[:-1]))


def test_what_a_peer_prints_may_be_no_text(bench: Bench) -> None:
    bench.ours({"int8dq@1": [1.0]})
    worker = "sys.stdout.buffer.write(b'\\xff\\n')\nsys.stderr.buffer.write(b'\\xfe')\n"
    bench.peer("binary", {}, worker + "'--prepare' in sys.argv or sys.exit(3)")
    said, _ = bench.run(*INT8, "--decode", "--rounds", "1")
    assert "binary is out: exit code 3: \N{REPLACEMENT CHARACTER}" in said


def test_a_folder_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    made_whole = run_path(str(ROOT / "bench/peers/peer_frame.py"))["made_whole"]
    folder = tmp_path / "models/int4"
    with pytest.raises(ZeroDivisionError), made_whole(folder) as partial:
        (partial / "half").write_text(str(1 / 0))
    (folder.parent / "int4.partial/half").touch()
    assert not folder.exists()
    with made_whole(folder) as partial:
        (partial / "all").touch()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["all"]
    assert (folder / "all").exists()


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
        (("--result-filename", "/nowhere/result"), "found /nowhere/result unwritable"),
        (("--timeout-s", "nan"), "found 'nan', expected a number of seconds above 0"),
        (("--timeout-s", "-1"), "found '-1', expected a number of seconds above 0"),
        (("--timeout-s", "0"), "found '0', expected a number of seconds above 0"),
        (("--started", "S"), "found --started without --from"),
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
