"""Registrations: what may be registered, where it may lie, what is kept, and what the operator's file says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tpllama.cli import build_parser
from tpllama.config import UserError
from tpllama.server.checking import Checker
from tpllama.server.command import settings
from tpllama.server.errors import ApiError
from tpllama.server.locate import Roots
from tpllama.server.models import Models
from tpllama.server.registration import Registration
from tpllama.server.registry import Entry, Registry
from tpllama.server.run_config import read_run_config


def registration(model_id: str = "m", location: str | None = None, **metadata: Any) -> Registration:
    return Registration(model_id=model_id, provider_model_id=location, metadata=metadata or None)


def test_both_names_of_the_flag_that_does_not_load() -> None:
    assert registration().is_loaded_at_once
    assert registration(skip_load=False).is_loaded_at_once
    for flag in ("skip_load", "skip_initialize"):
        assert not registration(**{flag: True}).is_loaded_at_once
        with pytest.raises(ValidationError, match=flag):
            registration(**{flag: "yes"})


def test_metadata_is_free_but_for_slips() -> None:
    noted = registration(torchao_config="int8wo", max_seq_len=64, owner="me", run={"id": 3})
    assert noted.engine_options == {"torchao_config": "int8wo", "max_seq_len": 64}
    for slip in ("torchao_confg", "skip_initialise", "max_seq_length"):
        with pytest.raises(ValidationError, match="looks like"):
            registration(**{slip: 1})


def test_the_same_is_no_conflict() -> None:
    registry = Registry()
    registry.add(Entry(registration("m", "x", dtype="float32"), {}))
    assert registry.same(registration("m", "x", dtype="float32", skip_load=True)) is registry.get("m")
    assert registry.same(registration("other")) is None
    for other in (registration("m", "y", dtype="float32"), registration("m", "x"), registration("m")):
        with pytest.raises(ApiError) as caught:
            registry.same(other)
        assert caught.value.status == 409


def test_what_is_registered_over_http_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "state.json"
    registry = Registry(file)
    registry.add(Entry(registration("mine"), {}))
    registry.add(Entry(registration("kept", "x", dtype="float32"), {}, is_kept=True))
    registry.note_loaded("kept")
    assert Registry(file).kept() == ([registration("kept", "x", dtype="float32")], "kept")
    registry.remove("kept")
    assert Registry(file).kept() == ([], None)
    assert [entry.name for entry in file.parent.iterdir()] == ["state.json"]  # nothing half-written
    for content in ("", "[]", '{"models": [{}]}', '{"models": 3}'):
        file.write_text(content)
        with pytest.raises(UserError, match=r"state\.json unreadable"):
            Registry(file).kept()


def test_paths_lead_nowhere_else(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "a" / "b").mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "circle").symlink_to(root / "circle")
    (root / "inner").symlink_to(root / "a")
    roots = Roots((root, tmp_path / "none"))
    assert roots.find("a/b") == str(root / "a/b")
    assert roots.find(str(root / "a")) == str(root / "a")
    assert roots.find("inner/b") == str(root / "inner/b")
    assert roots.find("a/../a/b") == str(root / "a/../a/b")
    for name in (
        "..",
        "../outside",
        "a/../../outside",
        str(outside),
        "link",
        "link/x",
        "/etc",
        "/",
        ".",
        "~root",
        "circle",
    ):
        with pytest.raises(ApiError) as caught:
            roots.find(name)
        assert caught.value.status == 403, name
    with pytest.raises(ApiError) as caught:
        roots.find("org/name")
    assert caught.value.status == 404
    assert all(str(folder / "org/name") in caught.value.message for folder in roots.folders)
    assert Roots((root,), allow_hub=True).find("org/name") == "org/name"


@pytest.fixture
def checker(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Checker:
    """Three models under a root: a base, one made from it, and one of another shape."""
    shutil.copytree(make_checkpoint(), tmp_path / "base")
    shutil.copytree(make_checkpoint(), tmp_path / "tuned")
    (tmp_path / "tuned" / "config.json").unlink()  # the base lends it
    shutil.copytree(make_checkpoint(hidden_size=48, num_attention_heads=3), tmp_path / "narrow")
    return Checker(Roots((tmp_path,)), {"tp": 1, "dtype": "float32"})


def refused(checker: Checker, *given: Any, **metadata: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        checker.options(registration(*given, **metadata), {})
    return caught.value


def test_registrations_are_checked_before_anything_is_loaded(checker: Checker, tmp_path: Path) -> None:
    assert checker.options(registration("base"), {}) == {"tp": 1, "dtype": "float32", "model": str(tmp_path / "base")}
    own = checker.options(registration("m", "base", dtype="bfloat16", torchao_config="int8wo", max_seq_len=64), {})
    assert (own["dtype"], own["torchao_config"], own["max_seq_len"]) == ("bfloat16", "int8wo", 64)
    options = checker.options(registration("tuned", llama_model="base"), {})
    assert options["llama_model"] == str(tmp_path / "base")
    named = checker.options(registration("tuned", llama_model="my base"), {"my base": str(tmp_path / "base")})
    assert named == options
    assert refused(checker, "nothing").status == 404
    for refusal, said in (
        (refused(checker, "tuned"), "no config.json"),
        (refused(checker, "narrow", llama_model="base"), "hidden_size 48"),
        (refused(checker, "base", llama_model="Llama-9"), "unknown base model 'Llama-9'"),
        (refused(checker, "base", torchao_config="int3"), "int3"),
        (refused(checker, "base", torchao_config="@/etc/passwd"), "recipe's name"),
        (refused(checker, "base", dtype="float8"), "float8"),
        (refused(checker, "base", max_seq_len=10**9), "max_seq_len"),
    ):
        assert refusal.status == 400
        assert said in refusal.message
    with pytest.raises(ApiError, match="tensor-parallel degree 1000"):
        Checker(checker.roots, {"tp": 1000}).options(registration("base"), {})


def test_an_adapter_leads_to_no_base_elsewhere(
    checker: Checker, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(make_checkpoint())
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    refusal = refused(checker, "adapter")
    assert (refusal.status, str(make_checkpoint()) in refusal.message) == (403, True)
    assert checker.options(registration("adapter", llama_model="base"), {})["llama_model"] == str(tmp_path / "base")


def test_a_restart_lists_all_again_and_says_what_is_gone(checker: Checker, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    models = Models(Registry(file), checker)
    assert models.restore([registration("base", skip_load=True)]) is None
    for name in ("narrow", "tuned"):
        given = registration(name, **({"llama_model": "base"} if name == "tuned" else {}))
        models._registry.add(Entry(given, {}, is_kept=True))
    models._registry.note_loaded("tuned")
    shutil.rmtree(tmp_path / "narrow")
    again = Models(Registry(file), checker)
    assert again.restore([registration("base", skip_load=True)]) == "tuned"
    listed = {each["id"]: each["custom_metadata"] for each in again.listed()}
    assert {name: each["status"] for name, each in listed.items()} == {
        "base": "registered", "narrow": "failed", "tuned": "registered",
    }  # fmt: skip
    assert "narrow" in listed["narrow"]["reason"]
    assert [each["model_id"] for each in json.loads(file.read_text())["models"]] == ["narrow", "tuned"]
    with pytest.raises(UserError, match=r"model gone .* no checkpoint"):
        Models(Registry(), checker).restore([registration("gone")])


RUN_YAML = """
host: ${env.HOST:=127.0.0.1}
port: ${env.PORT:=8321}
api_key: ${env.TPLLAMA_API_KEY:=}
model_roots: [~/.tpllama/checkpoints, here]
state_file: registry.json
on_demand: ${env.ON_DEMAND:=true}
engine: {tp: 2, dtype: float32}
models:
  - model_id: Llama3.2-3B-Instruct
  - model_id: my-finetune
    provider_model_id: runs/epoch_2
    metadata: {llama_model: Llama3.2-3B-Instruct, skip_initialize: true, torchao_config: int8wo}
"""


def test_the_operators_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN_YAML)
    config = read_run_config(file, {"PORT": "9000", "ON_DEMAND": "false"})
    assert (config.host, config.port, config.api_key, config.on_demand) == ("127.0.0.1", 9000, None, False)
    assert config.model_roots == [Path("~/.tpllama/checkpoints").expanduser(), tmp_path / "here"]
    assert config.state_file == tmp_path / "registry.json"
    assert config.engine == {"tp": 2, "dtype": "float32"}
    assert [each.is_loaded_at_once for each in config.models] == [True, False]
    assert read_run_config(file, {"TPLLAMA_API_KEY": "k"}).api_key == "k"


def test_without_a_file_models_lie_in_the_home_directory_and_nothing_is_kept() -> None:
    config = settings(build_parser().parse_args(["serve"]))
    assert (config.model_roots, config.state_file) == ([Path.home() / ".tpllama" / "checkpoints"], None)
    config = settings(build_parser().parse_args(["serve", "--model-root=~/m", "--state-file=~/s.json"]))
    assert (config.model_roots, config.state_file) == ([Path.home() / "m"], Path.home() / "s.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hots: x", "unknown key hots"),
        (
            "models: [{model_id: a, provider: b}]",
            r"unknown key models\.0\.provider in .*, expected one of model_id, provider_model_id, provider_id, meta",
        ),
        ("models: [{model_id: a, torchao_config: int8wo}]", r"models\.0\.torchao_config .*, put it under metadata"),
        ("models: [smollm2]", r"^found a text at models\.0 in .*, expected keys and values"),
        ("models: {model_id: smollm2}", "^found keys and values at models in .*, expected a list"),
        ("models: [{metadata: {}}]", r"^found no models\.0\.model_id in "),
        ("on_demand: perhaps", "^found on_demand 'perhaps' in .*, expected a valid boolean"),
        ("port: 99999", "port"),
        ("engine: {recipe: int8wo}", "recipe"),
        ("api_key: ${env.NOT_THERE}", "NOT_THERE"),
        ("a: [", "no YAML"),
        ("- a", "no keys"),
    ],
)
def test_a_file_that_can_not_be(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        read_run_config(file, {})
    assert "\n" not in str(caught.value)
