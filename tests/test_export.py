"""`tpllama quantize`: what it writes is what transformers and torchao make, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint import formats
from checkpoint.conftest import TINY_METADATA, write_gguf_file
from conftest import ROOT, Run
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saving import MIXED, assert_equal_weights, bits, quantize_to, weights_of
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torchao.quantization import Int4Tensor, quantize_
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from tpllama import reading
from tpllama.checkpoint.open import open_checkpoint
from tpllama.config import EngineConfig, UserError
from tpllama.quantization.neutral import parts_of
from tpllama.quantization.quantize import quantize
from tpllama.quantization.recipes import Recipe
from tpllama.reading import BlockReader
from tpllama.start import draw_blueprint

MakeCheckpoint = Callable[..., Path]
MAP = {"*.q_proj": "int8dq", "*.o_proj": "8da4w-32", "*.mlp.*": "fp8wo", "lm_head": "int8wo", "*": "none"}
RUNNABLE: dict[str, Any] = {name: name for name in ("int8wo", "int8dq", "8da4w-32", "fp8wo")} | {"map": MAP}
TOKENS = torch.tensor([[1, 5, 9, 20, 33, 4, 77, 8], [8, 7, 6, 5, 4, 3, 2, 1]])
INDEX = "model.safetensors.index.json"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def recipes_of(model: Path, recipe: str | dict[str, str], **engine: Any) -> dict[str, Recipe]:
    """The recipe of every linear module that is quantized."""
    path = model.parent / "recipes.json"
    if isinstance(recipe, dict):
        path.write_text(json.dumps(recipe))
        recipe = f"@{path}"
    config = EngineConfig(str(model), torchao_config=recipe, device="cpu", **engine)
    decisions = draw_blueprint(config, open_checkpoint(str(model))).decisions
    return {name: decision.recipe for name, decision in decisions.items() if decision.recipe is not None}


def load_saved(path: Path) -> LlamaForCausalLM:
    """By transformers, which must find all of its weights and no others."""
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return model.eval()


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("recipe", RUNNABLE)
@pytest.mark.parametrize("with_head", [False, True], ids=["", "head"])
@torch.no_grad()
def test_transformers_reads_what_torchao_would_have_made(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, is_tied: bool, dtype: str, recipe: str, with_head: bool
) -> None:
    model = make_checkpoint(tie_word_embeddings=is_tied)
    engine = {"dtype": dtype, "quantize_lm_head": with_head}
    saved = load_saved(quantize_to(tmp_path / "out", model, RUNNABLE[recipe], shard_bytes=70_000, **engine))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    expected = LlamaForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    recipes = recipes_of(model, RUNNABLE[recipe], **engine)
    assert ("lm_head" in recipes) == (with_head or recipe == "map")
    for name, each in recipes.items():
        linear = expected.get_submodule(name)
        linear.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)  # a tied embedding stays
        quantize_(linear, each.config())
    theirs, ours = dict(expected.named_parameters()), dict(saved.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert_same_tensor(name, ours[name].detach(), weight.detach())
    assert torch.equal(bits(saved(TOKENS).logits), bits(expected(TOKENS).logits))


def assert_same_tensor(name: str, found: Any, expected: Any) -> None:
    assert type(found) is type(expected), name
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    if hasattr(expected, "qdata"):
        assert plain(found) == plain(expected), name
        for part, values in parts_of(expected).items():
            assert torch.equal(bits(getattr(found, part)), bits(values)), (name, part)
    else:
        assert torch.equal(bits(found), bits(expected)), name


def plain(weight: Any) -> tuple[Any, str]:
    """Names of the parts, and attributes with tuples as lists, which JSON doesn't tell apart."""
    names, attributes = weight.__tensor_flatten__()
    return sorted(names), str({key: list(v) if isinstance(v, tuple) else v for key, v in sorted(attributes.items())})


@pytest.mark.parametrize("recipe", ["int4wo-32", "int4wo-64"])
def test_int4_is_two_values_a_byte_of_torchaos_int4(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, recipe: str
) -> None:
    """transformers can hold it; running it takes a package that isn't everywhere."""
    model = make_checkpoint()
    out = quantize_to(tmp_path / "out", model, recipe, dtype="bfloat16")
    saved, original = load_saved(out), LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    recipes = recipes_of(model, recipe)
    assert len(recipes) == 14
    size = 0
    for name, parameter in original.named_parameters():
        weight = saved.get_parameter(name).detach()
        if each := recipes.get(name.removesuffix(".weight")):
            assert isinstance(weight, Int4Tensor)
            expected = quantize(parameter.detach(), each, slice(0, parameter.shape[1]))
            assert_same_tensor(name, weight, expected)
            size += parameter.numel() // 2 + 2 * 2 * parameter.numel() // each.group_size
        else:
            size += 2 * parameter.numel()
    file = (out / "model.safetensors").stat().st_size
    assert size < file < size + 30_000  # the header


def test_the_config_lists_what_stays_plain(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    out = quantize_to(tmp_path / "out", make_checkpoint(), MAP)
    config = read(out / "config.json")
    stays = config["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.0.self_attn.k_proj" in stays
    assert not any(name.endswith(("q_proj", "up_proj", "lm_head")) for name in stays)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["model_type"], config["dtype"]) == ("llama", "float32")


def test_index_and_manifest_are_right(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model = make_checkpoint()
    out = quantize_to(tmp_path / "out", model, MAP, shard_bytes=70_000)
    shards = {file.name: load_file(file) for file in sorted(out.glob("*.safetensors"))}
    index, manifest = read(out / INDEX), read(out / "tpllama_manifest.json")
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    tensors = [tensor for held in shards.values() for tensor in held.values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors)
    assert all(sum(each.nbytes for each in held.values()) <= 70_000 for held in shards.values() if len(held) > 1)
    assert manifest["files"].keys() == shards.keys()
    source = manifest["source"]
    assert source["model"] == str(model)
    assert source["files"].keys() == {"model.safetensors"}
    content = (model / "model.safetensors").read_bytes()
    start = hashlib.sha256(content[: 1 << 22]).hexdigest()
    assert source["files"]["model.safetensors"] == {"bytes": len(content), "sha256_of_first_4_mib": start}
    for name, entry in manifest["files"].items():
        content = (out / name).read_bytes()
        header = content[: 8 + int.from_bytes(content[:8], "little")]
        assert entry == {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "header_sha256": hashlib.sha256(header).hexdigest(),
        }
    layers, recipes = manifest["layers"], recipes_of(model, MAP)
    assert {name for name, recipe in layers.items() if recipe != "none"} == {f"{name}.weight" for name in recipes}
    assert layers["model.layers.1.self_attn.q_proj.weight"] == "int8dq"
    assert layers["model.layers.1.self_attn.q_proj.bias"] == layers["model.norm.weight"] == "none"
    assert manifest["recipe"].endswith("out.map.json")
    assert manifest["versions"]["torch"] == torch.__version__


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<me>{% endif %}"


def write_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<s>", "</s>", "<me>"], show_progress=False
    )  # fewer than the model's 211
    tokenizer.train_from_iterator(["a text to merge some words of", "and more text, more words"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT)
    fast.save_pretrained(path)


def assert_same_tokenizer(found: Any, expected: Any) -> None:
    for text in ("a text to merge", "", " <s>more</s>  words\n", "é 漢 \U0001f600", "x" * 300):
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    assert found.get_vocab() == expected.get_vocab()
    assert found.special_tokens_map == expected.special_tokens_map
    assert found.chat_template == expected.chat_template
    if expected.chat_template:
        chat = [{"role": "user", "content": "a text"}]
        assert found.apply_chat_template(chat, tokenize=False) == expected.apply_chat_template(chat, tokenize=False)


def test_the_tokenizer_and_the_generation_config_come_along(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model = Path(shutil.copytree(make_checkpoint(), tmp_path / "model"))
    write_tokenizer(model)
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 1], "temperature": 0.6, "do_sample": true}')
    out = quantize_to(tmp_path / "out", model, "int8wo")
    assert_same_tokenizer(AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(model))
    generation = read(out / "generation_config.json")
    assert generation == {"eos_token_id": [7, 1, 2], "temperature": 0.6, "do_sample": True}
    assert open_checkpoint(str(out)).eos_token_ids == open_checkpoint(str(model)).eos_token_ids == (7, 1, 2)
    assert load_saved(out).generation_config.eos_token_id == [7, 1, 2]


@pytest.mark.parametrize(
    ("file", "content"), [("tokenizer.json", "{"), ("generation_config.json", "["), ("tokenizer.json", "[]")]
)
def test_damaged_small_files_are_known_before_weights_are_read(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: str
) -> None:
    model = Path(shutil.copytree(make_checkpoint(), tmp_path / "model"))
    (model / file).write_text(content)
    monkeypatch.setattr(BlockReader, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(UserError, match=r"^found "):
        quantize_to(tmp_path / "out", model, "int8wo")
    assert_nothing_written(tmp_path)


def assert_nothing_written(folder: Path, name: str = "out") -> None:
    assert not (folder / name).exists()
    assert not list(folder.glob(".*.incomplete"))


def check_source(source: Path, tmp_path: Path, recipe: str | dict[str, str] = MIXED, **engine: Any) -> Path:
    """What is written of `source` is what loading it makes."""
    out = quantize_to(tmp_path / "out", source, recipe, shard_bytes=70_000, **engine)
    asked = f"@{tmp_path / 'out.map.json'}" if isinstance(recipe, dict) else recipe
    expected = weights_of(source, torchao_config=asked, **engine)
    written = weights_of(out, **{key: value for key, value in engine.items() if key == "dtype"})
    head = written.pop("lm_head.weight", None) if "lm_head.weight" not in expected else None
    assert head is None or "qdata" in head
    assert_equal_weights(written, expected)
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_source_in_shards(make_checkpoint: MakeCheckpoint, tmp_path: Path, dtype: str) -> None:
    model = LlamaForCausalLM.from_pretrained(make_checkpoint())
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    out = check_source(tmp_path / "model", tmp_path, dtype=dtype)
    assert len(read(out / "tpllama_manifest.json")["source"]["files"]) > 2


@pytest.mark.parametrize("recipe", [*MIXED.values()])
def test_a_weight_in_blocks_of_rows(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.setattr(reading, "_BLOCK_ELEMENTS", {"cpu": 1})  # 256 rows
    source = make_checkpoint(intermediate_size=608, vocab_size=700)
    out = quantize_to(tmp_path / "out", source, recipe, quantize_lm_head=True)
    expected = weights_of(source, torchao_config=recipe, quantize_lm_head=True)
    assert_equal_weights(weights_of(out), expected)


def test_a_source_in_metas_form(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model = make_checkpoint(attention_bias=False, mlp_bias=False, head_dim=16)
    state, config = LlamaForCausalLM.from_pretrained(model).state_dict(), read(model / "config.json")
    formats.write_meta(tmp_path / "meta", state, config, shards=1)
    formats.write_tiktoken(tmp_path / "meta" / "tokenizer.model")
    out = check_source(tmp_path / "meta", tmp_path)
    assert_equal_weights(weights_of(out), weights_of(model, torchao_config=f"@{tmp_path / 'out.map.json'}"))
    load_saved(out)
    source = open_checkpoint(str(tmp_path / "meta"))
    assert_same_tokenizer(AutoTokenizer.from_pretrained(out), source.tokenizer())
    assert open_checkpoint(str(out)).eos_token_ids[: len(source.eos_token_ids)] == source.eos_token_ids


def test_a_source_in_ggufs_form(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)

    def random(*shape: int) -> tuple[np.ndarray, str]:
        return generator.standard_normal(shape).astype(np.float16), "F16"

    tensors = {"token_embd.weight": random(40, 64), "output_norm.weight": random(64)}
    for layer in range(2):
        shapes = {"attn_norm": (64,), "ffn_norm": (64,), "attn_q": (64, 64), "attn_output": (64, 64)}
        shapes |= {"attn_k": (32, 64), "attn_v": (32, 64)}
        shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
        tensors |= {f"blk.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
    source = write_gguf_file(tmp_path / "model.gguf", {**TINY_METADATA, "tokenizer.ggml.eos_token_id": 2}, tensors)
    out = check_source(source, tmp_path)
    load_saved(quantize_to(tmp_path / "other", source, "int8wo"))
    assert read(out / "generation_config.json")["eos_token_id"] == [2]


def test_a_source_with_an_adapter(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    base = Path(shutil.copytree(make_checkpoint(), tmp_path / "base"))
    (base / "generation_config.json").write_text('{"eos_token_id": [7], "temperature": 0.6}')
    write_tokenizer(base)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    tuned = get_peft_model(LlamaForCausalLM.from_pretrained(base), config)
    tuned.save_pretrained(tmp_path / "adapter")
    out = check_source(tmp_path / "adapter", tmp_path, llama_model=str(base))
    plain = weights_of(base, torchao_config=f"@{tmp_path / 'out.map.json'}")
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(weights_of(out)[name]["qdata"], plain[name]["qdata"])
    assert read(out / "generation_config.json") == {"eos_token_id": [7, 2], "temperature": 0.6}
    assert_same_tokenizer(AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(base))
    assert read(out / "tpllama_manifest.json")["source"]["files"].keys() >= {"adapter_model.safetensors"}


@pytest.mark.slow
def test_the_embedded_model(tpllama: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = tpllama("quantize", "smollm2", out, "--torchao-config", "int8wo", "--quantize-lm-head")
    assert done.returncode == 0, done.stderr
    assert_same_tokenizer(AutoTokenizer.from_pretrained(out), open_checkpoint("smollm2").tokenizer())
    assert set(open_checkpoint(str(out)).eos_token_ids) == set(open_checkpoint("smollm2").eos_token_ids)
    load_saved(out)
    question = ("generate", "What is the capital of France?", "--max-new-tokens", "12", "--model")
    here = tpllama(*question, "smollm2", "--torchao-config", "int8wo", "--quantize-lm-head")
    assert tpllama(*question, out).stdout == here.stdout


# What goes wrong.


@pytest.fixture
def model(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["out", "--torchao-config", "none"], "torchao config none"),
        (["out", "--torchao-config", "int8wo", "--load-format", "dummy"], "dummy"),
        (["full", "--torchao-config", "int8wo"], "there already"),
        (["full/file", "--torchao-config", "int8wo"], "there already"),
        (["full/file/out", "--torchao-config", "int8wo"], "can't be written"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_can_not_work_is_one_line_and_exit_code_2(
    tpllama: Run, model: Path, tmp_path: Path, arguments: list[str], word: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    result = tpllama("quantize", model, tmp_path / arguments[0], *arguments[1:])
    assert_fails(result, 2, word)
    assert_nothing_written(tmp_path)
    assert (tmp_path / "full" / "file").read_text() == "mine"


def test_a_place_that_is_taken_is_known_before_the_model_is_looked_at(tpllama: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = tpllama("quantize", "no/such/model/here", tmp_path, "--torchao-config", "int8wo")
    assert_fails(result, 2, "there already")
    assert len(result.stderr.splitlines()) == 1


def assert_fails(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """After the line that says what will be quantized, one error and nothing else."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("tpllama:")]
    errors = [line for line in lines if line.startswith("tpllama: error: found ")]
    assert len(errors) == 1, result.stderr
    assert len(lines) <= 2
    assert "Traceback" not in result.stderr
    assert all(word in errors[0] for word in words), errors[0]


def test_a_disk_that_takes_no_more(model: Path, tmp_path: Path) -> None:
    command = (
        f"ulimit -f 100; exec {sys.executable} -m tpllama quantize {model} {tmp_path / 'out'} --torchao-config int8wo"
    )
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert_fails(result, 1, "can't be written", "File too large")
    assert_nothing_written(tmp_path)


SLOW = """
import sys, time
from tpllama import cli, reading

read = reading.BlockReader.read

def slowly(self, *job):
    time.sleep({delay_s})
    return read(self, *job)

reading.BlockReader.read = slowly
cli.main(["quantize", {model!r}, {out!r}, "--torchao-config", {recipe!r}])
"""


def start_slowly(model: Path, out: Path, recipe: str = "int8wo", delay_s: float = 0.3) -> subprocess.Popen[str]:
    script = SLOW.format(delay_s=delay_s, model=str(model), out=str(out), recipe=recipe)
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_weights(folder: Path, count: int = 1) -> None:
    """Until that many runs have begun to write."""
    until = time.monotonic() + 60
    while len(list(folder.glob(".*.incomplete/model.safetensors"))) < count:
        assert time.monotonic() < until, "no run began"
        time.sleep(0.01)
    time.sleep(0.5)  # a weight or two further


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_run_that_is_killed_leaves_no_checkpoint(model: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    process = start_slowly(model, out)
    wait_for_weights(tmp_path)
    process.send_signal(getattr(signal, name))
    stdout, stderr = process.communicate(timeout=30)
    assert not out.exists()
    left = list(tmp_path.glob(".out.*.incomplete"))
    assert (stdout, "Traceback" in stderr) == ("", False)
    if name != "SIGKILL":
        assert process.returncode == 128 + getattr(signal, name)
        assert not left
    else:
        assert process.returncode == -signal.SIGKILL
        assert len(left) == 1
        with pytest.raises(UserError, match=r"^found weights but no config\.json in .*incomplete"):
            weights_of(left[0])
        # Not even with a config that fits.
        good = quantize_to(tmp_path / "good", model, "int8wo")
        shutil.copy(good / "config.json", left[0])
        with pytest.raises(UserError, match=r"^found a damaged weight file"):
            weights_of(left[0])
    quantize_to(out, model, "int8wo")
    assert_equal_weights(weights_of(out), weights_of(model, torchao_config="int8wo"))


def test_of_two_runs_at_once_one_wins(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runs = {recipe: start_slowly(model, out, recipe, delay_s=0.1) for recipe in ("int8wo", "fp8wo")}
    wait_for_weights(tmp_path, count=2)
    results = {
        recipe: subprocess.CompletedProcess(recipe, run.returncode, *said)
        for recipe, run, said in [(recipe, run, run.communicate(timeout=60)) for recipe, run in runs.items()]
    }
    assert sorted(result.returncode for result in results.values()) == [0, 2]
    winner = next(recipe for recipe, result in results.items() if result.returncode == 0)
    loser = next(result for result in results.values() if result.returncode == 2)
    assert_fails(loser, 2, str(out), "another process")
    assert not list(tmp_path.glob(".*"))
    assert_equal_weights(weights_of(out, dtype="bfloat16"), weights_of(model, torchao_config=winner, dtype="bfloat16"))


def damage(source: Path, tmp_path: Path) -> Iterator[Path]:
    """Copies of a source, each broken off at another place."""
    content = (source / "model.safetensors").read_bytes()
    for number, size in enumerate((0, 100, len(content) // 2, len(content) - 1)):
        copy = Path(shutil.copytree(source, tmp_path / f"model{number}"))
        (copy / "model.safetensors").write_bytes(content[:size])
        yield copy


def test_a_damaged_source(model: Path, tmp_path: Path) -> None:
    for source in damage(model, tmp_path):
        with pytest.raises(UserError, match="damaged weight file"):
            quantize_to(tmp_path / "out", source, "int8wo")
        assert_nothing_written(tmp_path)


def test_a_source_that_is_found_damaged_in_the_middle(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_block, reads = BlockReader.read, []

    def read_some(self: BlockReader, *job: Any) -> Tensor:
        reads.append(job)
        if len(reads) > 9:
            raise UserError("found a damaged weight file")
        return read_block(self, *job)

    monkeypatch.setattr(BlockReader, "read", read_some)
    with pytest.raises(UserError, match="damaged weight file"):
        quantize_to(tmp_path / "out", model, "int8wo")
    assert_nothing_written(tmp_path)


def test_values_that_are_no_numbers_under_strict(model: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(model, tmp_path / "model"))
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][-1, -1] = float("inf")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"no finite number in tensor {name}, expected "):
        quantize_to(tmp_path / "out", source, "fp8wo", strict=True)
    assert_nothing_written(tmp_path)


def test_tensors_that_do_not_fit_the_config(model: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(model, tmp_path / "model"))
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        quantize_to(tmp_path / "out", source, "int8wo")
    assert_nothing_written(tmp_path)


MEASURED = """
import sys
import torch
from tpllama.checkpoint.open import open_checkpoint
from tpllama.config import EngineConfig
from tpllama.export import export
from tpllama.quantization.neutral import blank
from tpllama.quantization.recipes import RECIPES
from tpllama.start import draw_blueprint
from pathlib import Path

torch.set_num_threads(1)
model, out, recipe = sys.argv[1:]
checkpoint = open_checkpoint(model)
engine = EngineConfig(model, torchao_config=recipe, quantize_lm_head=True, device="cpu")
blueprint = draw_blueprint(engine, checkpoint)
blank(RECIPES[recipe], 64, 1024, torch.bfloat16)  # imports torchao
print("ready", flush=True)
sys.stdin.readline()
export(blueprint, checkpoint, Path(out))
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8wo", "int4wo-128", "8da4w-128", "fp8wo"])
def test_memory_is_a_few_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """A model of 300 MB, a third of it one weight, which is read twice: as embedding and as the head."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import load_memory
    import shapes

    fields = {**shapes.SHAPES["small"], "vocab_size": 48000, "num_hidden_layers": 7}
    shapes.write_checkpoint(tmp_path / "model", fields)
    assert sum(file.stat().st_size for file in (tmp_path / "model").iterdir()) > 3e8
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "model"), str(tmp_path / "out"), recipe]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ
    )
    try:
        assert load_memory.lines(process) == ["ready"]
        sampler = load_memory.Sampler(process.pid)
        load_memory.say(process, "go")
        assert load_memory.lines(process) == ["done"]
        sampler.stop()
    finally:
        process.kill()
        process.wait()
    taken = sampler.peak - sampler.baseline
    print(f"{recipe}: {taken / 1e6:.0f} MB")
    assert 0 < taken < 150e6


def test_strict_holds_for_what_is_stored(make_checkpoint: Any, tmp_path: Path) -> None:
    """A layer that was regrouped when it was quantized isn't as asked, now as then."""
    model = make_checkpoint()
    out = quantize_to(tmp_path / "out", model, "int4wo-64", dtype="bfloat16")
    assert weights_of(out, torchao_config="int4wo-64")
    for path in (model, out):
        with pytest.raises(UserError, match="as asked"):
            weights_of(path, torchao_config="int4wo-64", strict=True)


def test_a_quantized_head_of_a_tied_config_is_an_error(make_checkpoint: Any, tmp_path: Path) -> None:
    out = quantize_to(tmp_path / "out", make_checkpoint(tie_word_embeddings=True), "int8wo", quantize_lm_head=True)
    assert "lm_head.weight" in weights_of(out)
    with pytest.raises(UserError, match=r"^found lm_head stored quantized .* tie_word_embeddings false"):
        weights_of(out, json_model_override_args={"tie_word_embeddings": True})


def test_a_config_that_speaks_of_quantization_where_there_is_none_is_said(make_checkpoint: Any, tmp_path: Path) -> None:
    out = quantize_to(tmp_path / "out", make_checkpoint(), "int8wo")
    assert not open_checkpoint(str(out)).notes
    assert "made-up ones are not" in open_checkpoint(str(out), weights=False).notes[0]
    plain = tmp_path / "plain"
    shutil.copytree(make_checkpoint(), plain)
    shutil.copy(out / "config.json", plain)
    assert "those in the files are not" in open_checkpoint(str(plain)).notes[0]


def test_a_value_that_is_no_number_ends_the_writing_under_strict(make_checkpoint: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(make_checkpoint(), bad)
    state = load_file(bad / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.inf
    save_file(state, bad / "model.safetensors")
    with pytest.raises(UserError, match=r"^found a value .* model.layers.0.mlp.up_proj.weight, expected none"):
        quantize_to(tmp_path / "out", bad, "int8wo", strict=True)
    assert not (tmp_path / "out").exists()
    quantize_to(tmp_path / "out", bad, "int8wo")


def test_under_torchrun_a_rank_says_what_it_alone_found(make_checkpoint: Any, tmp_path: Path) -> None:
    """A zero point that no recipe makes, in rows that only the second rank reads."""
    out = quantize_to(tmp_path / "out", make_checkpoint(), "int8wo")
    name = "model.layers.1.mlp.up_proj._weight_zero_point"
    tensors = load_file(out / "model.safetensors")
    tensors[name][-1] = 1
    with safe_open(out / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, out / "model.safetensors", metadata)
    (out / "tpllama_manifest.json").unlink()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tpllama", "generate"]
    done = subprocess.run(
        [*command, "--model", str(out), "--dtype", "float32", "x"], capture_output=True, text=True, timeout=120,
        cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.count("tpllama: error: found") == 1, done.stderr
