"""The real command: what it prints, and each way it refuses: one line, exit code 2, before weights are read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Run
from safetensors.torch import load_file, save_file

from tpllama import LLM, SamplingParams, __version__
from tpllama.quantization.recipes import RECIPES

MakeCheckpoint = Callable[..., Path]
FRANCE = "What is the capital of France?"


@pytest.fixture
def checkpoint(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(make_checkpoint(), tmp_path / "model"))


def assert_refused(run: Run, *arguments: str | Path, words: tuple[str, ...], code: int = 2) -> None:
    result = run("generate", "hi", *arguments)
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("tpllama: error: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-cache-memory", "lots"], ["--kv-cache-memory", "found size 'lots'", "512MiB"]),
        (["--kv-cache-memory", "1KiB"], ["1024 bytes", "two blocks"]),
        (["--kv-cache-memory", "1e9GiB"], ["free for each rank", "--kv-cache-memory"]),
        (["--swap-memory", "900TiB"], ["--swap-memory", "found size"]),
        (["--block-size", "0"], ["found block_size 0"]),
        (["--max-batch-tokens", "4"], ["max_batch_tokens 4", "--max-batch-size"]),
        (["--json-schema", "@/nope"], ["--json-schema", "/nope", "unreadable"]),
        (["--json-schema", "{"], ["json_schema"]),
        (["--regex", "(a"], ["regex", "unclosed"]),
        (["--n", "1000000"], ["found n 1000000"]),
    ],
)
def test_what_the_engine_cannot_do_is_said_in_a_line(tpllama: Run, flags: list[str], words: list[str]) -> None:
    result = tpllama("generate", FRANCE, *flags)
    assert (result.returncode, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("tpllama: error: found ")
    assert all(word in line for word in words), line


def test_an_answer_streams_to_stdout_and_a_summary_to_stderr(tpllama: Run) -> None:
    result = tpllama("generate", FRANCE, "--tp", "2", "--torchao-config", "int8wo")
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "<|" not in result.stdout
    lines = result.stderr.splitlines()
    assert len(lines) == 2, result.stderr
    assert "quantized 210 linear layers to int8wo" in lines[0]
    for words in ("37 prompt tokens", "new tokens", "time to first token", "tokens/s", "peak memory"):
        assert words in lines[1]


def test_several_prompts_run_as_one_batch_and_come_out_in_order(tpllama: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Name a colour.\n\nHi\n")
    result = tpllama(
        "generate", FRANCE, "--prompts-file", prompts, "--json", "--max-new-tokens", "12", "--logprobs", "2"
    )
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["prompt"] for record in records] == [FRANCE, "Name a colour.", "Hi"]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert "Paris" in records[0]["text"]
    for record in records:
        assert record["completion_tokens"] == len(record["token_ids"]) == len(record["logprobs"]) <= 12
        assert record["finish_reason"] == ("stop" if record["token_ids"][-1] == 2 else "length")
        assert all(len(each["top_logprobs"]) == 2 for each in record["logprobs"])


def test_standard_input_is_a_prompt(tpllama: Run) -> None:
    result = tpllama("generate", "--raw", "--max-new-tokens", "3", stdin="The capital of France is")
    assert result.returncode == 0
    assert "Paris" in result.stdout
    assert len(result.stderr.splitlines()) == 1, result.stderr


def test_an_answer_longer_than_the_context_is_asked_for_with_a_note(tpllama: Run) -> None:
    result = tpllama("generate", "hi", "--max-new-tokens", "61", "--max-seq-len", "60", "--regex", "a")
    assert (result.returncode, result.stdout) == (0, "a\n")
    note, _ = result.stderr.splitlines()
    assert note.startswith("tpllama: --max-new-tokens 61 is more than there are places")
    assert "have 60 tokens" in note


def test_chat_remembers_until_reset(tpllama: Run) -> None:
    question = "What is the capital of France?"
    turns = f"My favourite colour is green.\n{question}\n/nonsense\n/reset\n{question}\n/exit\nnot read\n"
    result = tpllama("chat", "--dtype", "float32", "--max-new-tokens", "16", stdin=turns)
    assert result.returncode == 0, result.stderr
    assert "/nonsense" in result.stderr
    first, second, fresh = result.stdout.splitlines()
    history = [
        {"role": "user", "content": "My favourite colour is green."},
        {"role": "assistant", "content": first},
        {"role": "user", "content": question},
    ]
    with LLM(dtype="float32") as llm:
        expected = llm.chat([history, history[2:]], SamplingParams(max_new_tokens=16))
    assert [output.text for output in expected] == [second, fresh]


def test_a_conversation_that_outgrows_the_context_goes_on(tpllama: Run) -> None:
    result = tpllama("chat", "--max-seq-len", "60", "--max-new-tokens", "4", stdin=f"{'word ' * 80}\nHi\n")
    assert result.returncode == 0
    assert "context" in result.stderr
    assert result.stdout.strip()


def test_plan_answers_without_reading_weights(tpllama: Run, checkpoint: Path) -> None:
    damaged = checkpoint / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1000:] = b"\xff" * 1000  # weights that would be NaN
    damaged.write_bytes(content)
    result = tpllama("plan", "--model", checkpoint, "--tp", "4", "--torchao-config", "int4wo-64", "--json")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["tp"] == 4
    assert plan["legal_tp"] == [1, 2, 3, 4, 5, 6]
    assert len(plan["bytes_per_rank"]) == len(plan["kv_bytes_per_token_per_rank"]) == 4
    layers = {layer["name"]: layer for layer in plan["layers"]}
    down = layers["model.layers.1.mlp.down_proj"]
    assert down["plan"] == "row"
    assert sum(shape[1] for shape in down["local_shapes"]) == down["global_shape"][1] == 224
    assert (down["action"], down["recipe"], down["group_size"]) == ("quantized", "int4wo-32", 32)
    assert "not a multiple of 64" in down["reason"]
    assert layers["lm_head"]["action"] == "kept"


def test_plan_for_people_groups_equal_layers(tpllama: Run) -> None:
    result = tpllama("plan", "--tp", "2", "--torchao-config", "int8wo")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["model.layers.*.self_attn.q_proj", "30", "column", "576x576", "384x576", "192x576", "int8wo"] in rows


def test_plan_for_people_counts_ranks_of_equal_shapes(tpllama: Run) -> None:
    lines = tpllama("plan", "--tp", "9").stdout.splitlines()
    assert any("  1536x576   176x576 (6), 160x576 (3)  " in line and "up_proj" in line for line in lines), lines
    assert any("  576x576    64x576  " in line and "q_proj" in line for line in lines), lines


def test_dummy_weights_need_config_alone(tpllama: Run, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    result = tpllama("plan", "--model", checkpoint, "--load-format", "dummy", "--json")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--torchao-config", "int9wo"], ("int9wo", "int8wo", "int4wo-128")),
        (["--torchao-config", "int8wo-extra"], ("int8wo-extra",)),
        (["--torchao-config", "fp8dq-per_row"], ("fp8dq-per_row", "cpu", "int8wo")),
        (["--torchao-config", "@nowhere.json"], ("nowhere.json",)),
        (["--model", "no/such/model/here"], ("no/such/model/here",)),
        (["--tp", "10"], ("10", "1 to 9")),
        (["--tp", "0"], ("tp 0",)),
        (["--torchao-conf", "int8wo"], ("--torchao-conf",)),
        (["--quantize-lm-head"], ("--quantize-lm-head",)),
        (["--json-model-override-args", '{"num_hidden_layers": 1000000000}'], ("num_hidden_layers", "4096")),
        (["--no-such-flag"], ("--no-such-flag",)),
        (["--dtype", "int8"], ("int8", "bfloat16")),
        (["--max-seq-len", "20"], ("20", "tokens")),
        (["--max-seq-len", "100000"], ("100000", "8192")),
        (["--temperature", "-1"], ("temperature",)),
        (["--logprobs", "2"], ("--logprobs", "--json")),
        (["--json-model-override-args", "{"], ("JSON",)),
        (["--json-model-override-args", '{"sliding_window": 7}'], ("sliding_window",)),
        (["--device", "cuda"], ("CUDA",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_can_not_work_is_one_line_and_exit_code_2(
    tpllama: Run, arguments: list[str], words: tuple[str, ...]
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert_refused(tpllama, *arguments, words=words)


def test_one_line_even_from_many_ranks(tpllama: Run) -> None:
    assert_refused(
        tpllama, "--tp", "3", "--torchao-config", "int4wo-128", "--strict", words=("--strict", "q_proj", "576")
    )


def test_truncated_safetensors(tpllama: Run, checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(tpllama, "--model", checkpoint, words=("model.safetensors",))


def test_missing_shard_and_corrupt_index(tpllama: Run, checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, checkpoint / "model-00001-of-00002.safetensors")
    (checkpoint / "model.safetensors").unlink()
    index = checkpoint / "model.safetensors.index.json"
    shards = {name: f"model-0000{1 if name in names[:5] else 2}-of-00002.safetensors" for name in names}
    index.write_text(json.dumps({"weight_map": shards}))
    assert_refused(tpllama, "--model", checkpoint, words=("model-00002-of-00002.safetensors",))
    index.write_text('{"weight_map": {')
    assert_refused(tpllama, "--model", checkpoint, words=("model.safetensors.index.json",))


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_tensors_that_do_not_fit_are_named(tpllama: Run, checkpoint: Path, change: str) -> None:
    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.self_attn.k_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors[name := "model.layers.0.self_attn.q_norm.weight"] = torch.ones(32)
    else:
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, weights)
    assert_refused(tpllama, "--model", checkpoint, words=(name,))


def test_a_script_hears_nothing_of_libraries_and_all_that_is_its_own(checkpoint: Path) -> None:
    script = f"""
import logging
from tpllama import LLM
with LLM({str(checkpoint)!r}, torchao_config="int8wo") as llm:
    llm.logits([[1, 2, 3]])
logging.getLogger("torchao").warning("mine")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "mine\n")


@pytest.mark.parametrize("tp", ["1", "2"])
def test_strict_names_a_tensor_with_nan_on_whichever_rank_holds_it(tpllama: Run, checkpoint: Path, tp: str) -> None:
    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = float("nan")
    save_file(tensors, weights)
    assert_refused_with_ids(tpllama, checkpoint, tp)


def assert_refused_with_ids(run: Run, checkpoint: Path, tp: str) -> None:
    """The tiny checkpoint has no tokenizer: through the Python API, as a script."""
    script = f"""
import sys
from tpllama import LLM, UserError
try:
    LLM({str(checkpoint)!r}, tp={tp}, strict=True)
except UserError as error:
    print(error)
    sys.exit(2)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2, result.stderr
    assert "model.layers.1.mlp.up_proj.weight" in result.stdout


def test_a_checkpoint_without_tokenizer_says_so(tpllama: Run, checkpoint: Path) -> None:
    assert_refused(tpllama, "--model", checkpoint, words=("tokenizer",))


def test_contradicting_tp_under_torchrun(tpllama: Run) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    result = tpllama("generate", "hi", "--tp", "3", env=world)
    assert result.returncode == 2
    assert "--tp 3" in result.stderr
    assert tpllama("generate", "hi", "--tp", "3", env=world | {"RANK": "1"}).stderr == ""


def test_help_lists_the_commands(tpllama: Run) -> None:
    result = tpllama("--help")
    assert result.returncode == 0
    for command in ("generate", "chat", "plan"):
        assert command in result.stdout


def test_help_says_what_holds_where_nothing_is_given(tpllama: Run) -> None:
    text = " ".join(tpllama("generate", "--help").stdout.split())
    assert f"{', '.join(RECIPES)} (default none)" in text
    for default in ("(256)", "(32)", "(512)", "(bfloat16)", "(1)", "(0)", "(1: off)", "auto (default)"):
        assert default in text


def test_the_version_is_the_packages(tpllama: Run) -> None:
    result = tpllama("--version")
    assert (result.returncode, result.stdout) == (0, f"tpllama {version('tpllama')}\n")
    assert __version__ == version("tpllama")


def test_a_command_that_is_missing_is_said_in_words(tpllama: Run) -> None:
    result = tpllama()
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "tpllama: error: found no COMMAND, expected it, see tpllama --help\n"


def test_debug_shows_the_traceback(tpllama: Run) -> None:
    result = tpllama("generate", "hi", "--model", "nowhere.gguf", "--debug")
    assert result.returncode == 2
    assert "Traceback" in result.stderr


def test_code_in_a_checkpoint_is_never_run_nor_asked_about(tpllama: Run, checkpoint: Path) -> None:
    (checkpoint / "my_tokenizer.py").write_text(f"open({str(checkpoint / 'ran')!r}, 'w')\n")
    auto_map = {"AutoTokenizer": [None, "my_tokenizer.MyTokenizer"]}
    fields = {"tokenizer_class": "MyTokenizer", "auto_map": auto_map}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(fields))
    result = tpllama("generate", "hi", "--model", checkpoint, stdin="y\ny\ny\n")
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert not (checkpoint / "ran").exists()


def test_closed_streams_are_no_crash() -> None:
    command = f"{sys.executable} -m tpllama generate hi --max-new-tokens 2 >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_integer_weights_are_refused_by_name(tpllama: Run, checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, weights)
    assert_refused(tpllama, "--model", checkpoint, words=(name, "dtype i8"))
