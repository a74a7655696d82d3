"""The server's life on two ranks, as its users have it: models come, go and fail, and no answer is lost or wrong."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tpllama import LLM, SamplingParams

from .serving import ServerProcess, events, write_run_config

pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"
NEW_TOKENS = 48
FLOAT32 = ("--dtype", "float32")


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a folder, and one that was made from it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    from tpllama.checkpoint.open import open_checkpoint

    path, root = open_checkpoint("smollm2").path, tmp_path_factory.mktemp("roots")
    given = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    del given.config.quantization_config
    model = LlamaForCausalLM(given.config)
    model.load_state_dict(given.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model.save_pretrained(root / "SmolLM2")
    tokenizer.save_pretrained(root / "SmolLM2")
    with torch.no_grad():
        model.model.layers[5].mlp.down_proj.weight.mul_(0.25)
    model.save_pretrained(root / "runs" / "epoch_2")  # without a tokenizer: the base lends its own
    return root


def expected(model: Path | str, prompts: list[str], max_tokens: int, **options: Any) -> list[list[int]]:
    """The offline run's greedy tokens."""
    with LLM(str(model), dtype="float32", **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=max_tokens, ignore_eos=True))
        return [output.token_ids for output in outputs]


def complete(client: httpx.Client, model: str, prompt: str = PROMPT, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=body | {"return_token_ids": True} | more)


def token_ids(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def streamed(url: str, model: str, prompt: str, begun: threading.Event, max_tokens: int) -> Any:
    """A stream's token ids, or the error that ended it."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    tokens: list[int] = []
    with (
        httpx.Client(base_url=url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        if response.status_code != 200:
            return response.status_code
        for event in events(response):
            if "error" in event:
                return event["error"]
            tokens += event["choices"][0].get("token_ids", [])
            begun.set()
    return tokens


def streams(pool: ThreadPoolExecutor, url: str, model: str, prompts: list[str], max_tokens: int) -> list[Any]:
    """Streams that all have begun."""
    begun = [threading.Event() for _ in prompts]
    futures = [
        pool.submit(streamed, url, model, prompt, event, max_tokens)
        for prompt, event in zip(prompts, begun, strict=True)
    ]
    for event in begun:
        assert event.wait(60)
    return futures


def status(client: httpx.Client, model: str) -> str:
    return client.get(f"/v1/models/{model}").json()["custom_metadata"]["status"]


def test_the_story(roots: Path, tmp_path: Path) -> None:
    config = write_run_config(tmp_path, f"model_roots: [{roots}]\nstate_file: state.json\n")
    prompts = [f"{PROMPT} {number}, and" for number in range(8)]
    base_tokens = expected(roots / "SmolLM2", prompts, NEW_TOKENS, tp=2)
    lender = str(roots / "SmolLM2")
    tuned = expected(roots / "runs", [PROMPT], NEW_TOKENS, tp=2, torchao_config="int8wo", llama_model=lender)[0]
    with ServerProcess("--config", config, "--tp", "2", *FLOAT32) as server, server.client() as client:
        assert client.get("/v1/models").json()["data"] == []
        base = {"model_id": "SmolLM2", "metadata": {"skip_initialize": True}}
        assert client.post("/v1/models", json=base).status_code == 200
        assert status(client, "SmolLM2") == "registered"
        assert not server.children()
        chat = {"model": "SmolLM2", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        answer = client.post("/v1/chat/completions", json=chat | {"temperature": 0}).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert status(client, "SmolLM2") == "loaded"

        metadata = {"llama_model": "SmolLM2", "torchao_config": "int8wo"}
        second = {"model_id": "tuned", "provider_model_id": "runs", "metadata": metadata}
        with ThreadPoolExecutor(16) as pool:
            running = streams(pool, server.url, "SmolLM2", prompts, NEW_TOKENS)
            response = client.post("/v1/models", json=second)  # loads, after the eight have finished
            assert response.status_code == 200, response.text
            assert [future.result() for future in running] == base_tokens
            assert token_ids(complete(client, "tuned")) == tuned
            running = streams(pool, server.url, "tuned", [PROMPT] * 8, NEW_TOKENS)
            assert token_ids(complete(client, "SmolLM2", prompts[0])) == base_tokens[0]  # switches back
            assert [future.result() for future in running] == [tuned] * 8

        loaded = server.memory_bytes()
        for model in ("tuned", "SmolLM2"):
            assert client.delete(f"/v1/models/{model}").status_code == 204
        assert server.memory_bytes() < loaded / 2
        assert not server.children()
        assert client.get("/v1/models").json()["data"] == []
        for body in (base, second):
            assert client.post("/v1/models", json=body).status_code == 200
        assert server.stop() == 0

    with ServerProcess("--config", config, "--tp", "2", *FLOAT32) as server, server.client() as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["SmolLM2", "tuned"]
        server.wait_until_ready()
        assert status(client, "tuned") == "loaded"  # as before
        token_ids(complete(client, "SmolLM2", prompts[0]))
        with ThreadPoolExecutor(4) as pool:
            running = streams(pool, server.url, "SmolLM2", prompts[:4], 2000)
            server.children()[-1].kill()
            killed = time.monotonic()
            errors = [future.result() for future in running]
            assert time.monotonic() - killed < 5
        assert [error["code"] for error in errors] == ["model_failed"] * 4
        assert token_ids(complete(client, "SmolLM2", prompts[0])) == base_tokens[0]
        assert client.get("/health").json() == {"status": "ok"}


def test_two_hundred_requests_have_the_tokens_of_the_offline_run(tmp_path: Path) -> None:
    words = ["red", "green", "blue", "one", "two", "three", "sun", "moon", "star", "sea", "land", "sky"]
    draw = random.Random(0)
    prompts = [" ".join(draw.choices(words, k=draw.randint(1, 60))) for _ in range(200)]
    offline = expected("smollm2", prompts, 16, tp=2)
    with ServerProcess("--model", "smollm2", "--tp", "2", *FLOAT32) as server, server.client() as client:
        server.wait_until_ready()
        with ThreadPoolExecutor(32) as pool:
            started = time.monotonic()
            answers = list(
                pool.map(lambda prompt: token_ids(complete(client, "smollm2", prompt, max_tokens=16)), prompts)
            )
            seconds = time.monotonic() - started
        different = [number for number in range(200) if answers[number] != offline[number]]
        assert not different
        metrics = client.get("/metrics").text
        assert 'tpllama_requests_total{model="smollm2",outcome="length"} 200.0' in metrics
        assert 'tpllama_cache_used_blocks{model="smollm2"} 0.0' in metrics
        print(f"200 requests in {seconds:.1f} s")


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "tpllama")


def test_torchrun_starts_the_ranks_again_and_the_models_are_there(roots: Path, tmp_path: Path) -> None:
    config = write_run_config(tmp_path, f"model_roots: [{roots}]\nstate_file: state.json\n")
    with ServerProcess("--config", config, *FLOAT32, launcher=TORCHRUN) as server:
        with server.client() as client:
            assert client.post("/v1/models", json={"model_id": "SmolLM2"}, timeout=100).status_code == 200
            before = token_ids(complete(client, "SmolLM2"))
            second = {"model_id": "runs", "metadata": {"llama_model": "SmolLM2"}}
            assert client.post("/v1/models", json=second).status_code == 200
            assert token_ids(complete(client, "SmolLM2")) == before  # each rank has switched there and back
        with ThreadPoolExecutor(4) as pool:
            running = streams(pool, server.url, "SmolLM2", [PROMPT] * 4, 2000)
            lines, killed = len(server.lines), time.monotonic()
            ranks = [each for each in server.children() if "RANK" in each.environ()]
            next(each for each in ranks if each.environ()["RANK"] == "1").kill()
            errors = [future.result() for future in running]
            assert time.monotonic() - killed < 5
        assert all(error["code"] in ("model_failed", "shutting_down") for error in errors), errors
        url = server.line(r"serving on (http://\S+)", lines)[1]
        server.line("loaded SmolLM2", lines)
        with httpx.Client(base_url=url, timeout=60) as client:
            assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["SmolLM2", "runs"]
            assert token_ids(complete(client, "SmolLM2")) == before
        print(f"again in {time.monotonic() - killed:.1f} s")


def test_under_torchrun_a_load_that_fails_on_one_rank_leaves_the_model_before(roots: Path, tmp_path: Path) -> None:
    # A sitecustomize that makes a second load fail on rank 1 alone, as a broken disk would.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.environ.get('RANK') == '1' and 'serve' in sys.argv + sys.orig_argv:\n"
        "    import tpllama.checkpoint.huggingface as huggingface\n"
        "    read = huggingface.HuggingFaceCheckpoint.read\n"
        "    def broken(self, name, index):\n"
        "        if 'epoch_2' in str(self.path):\n"
        "            raise OSError(5, 'Input/output error')\n"
        "        return read(self, name, index)\n"
        "    huggingface.HuggingFaceCheckpoint.read = broken\n"
    )
    config = write_run_config(tmp_path, f"model_roots: [{roots}]\nstate_file: state.json\n")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}"
    with (
        ServerProcess("--config", config, *FLOAT32, launcher=TORCHRUN, env={"PYTHONPATH": path}) as server,
        server.client() as client,
    ):
        assert client.post("/v1/models", json={"model_id": "SmolLM2"}, timeout=100).status_code == 200
        before = token_ids(complete(client, "SmolLM2"))
        second = {"model_id": "runs", "metadata": {"llama_model": "SmolLM2"}}
        response = client.post("/v1/models", json=second)
        assert response.status_code == 503
        assert "rank 1 failed" in response.json()["error"]["message"]
        assert "Input/output error" in response.json()["error"]["message"]
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["SmolLM2"]
        assert status(client, "SmolLM2") == "loaded"
        assert token_ids(complete(client, "SmolLM2")) == before
        assert server.process.poll() is None
        assert sum("serving on" in line for line in server.lines) == 1
