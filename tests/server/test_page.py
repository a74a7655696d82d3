"""The page at `/` in a real browser, before a real server: what a person does there, and what they see."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .serving import ServerProcess, write_run_config

pytestmark = pytest.mark.slow

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1400,1000",
)  # fmt: skip
# Notes how long the last turn's text is each time that it changes.
WATCH = """
window.lengths = [];
new MutationObserver(() => window.lengths.push(document.querySelector("#log").lastChild?.textContent.length ?? 0))
  .observe(document.querySelector("#log"), {childList: true, subtree: true, characterData: true});
"""
MARKUP = """<img src="x" onerror="document.title = 'broken'"> What is the capital of France?"""


class Page:
    """The page in a browser, by what is seen on it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.find(selector).text

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements("css selector", selector))

    def write(self, selector: str, text: str) -> None:
        self.find(selector).clear()
        self.find(selector).send_keys(text)

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def cells(self, table: str) -> list[list[str]]:
        """The texts of a table's body."""
        rows = f"[...document.querySelector('{table}').tBodies[0].rows]"
        return self.driver.execute_script(f"return {rows}.map(row => [...row.cells].map(cell => cell.innerText))")

    def row(self, model: str) -> str:
        """The text of a model's row; empty where it has none."""
        return next((" ".join(row) for row in self.cells("#models") if row[0].split("\n")[0] == model), "")

    def press(self, model: str, button: str) -> None:
        """Presses a button of a model's row, once it can be."""
        path = f"//table[@id='models']//tr[td[1][starts-with(., '{model}')]]//button[.='{button}' and not(@disabled)]"
        self.until(lambda: self.driver.find_elements("xpath", path))
        self.driver.find_element("xpath", path).click()

    def until(self, condition: Callable[[], Any], within_s: float = 60) -> None:
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.wait import WebDriverWait

        ignored = [StaleElementReferenceException]  # rows are made anew when something changes
        WebDriverWait(self.driver, within_s, 0.05, ignored).until(lambda _: condition())


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    if BROWSER is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver")
    if importlib.util.find_spec("selenium") is None:
        pytest.skip("no selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'browser'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Page(driver)
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("server")
    config = write_run_config(path, "model_roots: [roots]\nstate_file: state.json\nmodels: [{model_id: smollm2}]\n")
    with ServerProcess("--config", config, "--dtype", "float32") as process:
        process.wait_until_ready()
        yield process


def severe(page: Page) -> list[str]:
    """The console's errors: of scripts, of the content policy, and of things that could not be fetched."""
    return [entry["message"] for entry in page.driver.get_log("browser") if entry["level"] == "SEVERE"]


def test_an_answer_is_seen_as_it_comes_and_can_be_stopped(page: Page, server: ServerProcess) -> None:
    page.open(server.url)
    page.until(lambda: page.text("#state") == "smollm2 is loaded")
    page.driver.execute_script(WATCH)
    page.write("#system", "You are a helpful assistant.")
    page.write("#temperature", "0")
    page.write("#max-tokens", "40")
    page.write("#message", MARKUP)
    page.click("#send")
    page.until(lambda: "ended by" in page.text("#speed"))
    assert "Paris" in page.text(".turn.assistant")
    lengths = page.driver.execute_script("return window.lengths")
    assert len(set(lengths)) > 5, "text did not come in pieces"
    assert lengths[1:] == sorted(lengths[1:])
    assert page.text(".turn.user").endswith(MARKUP)  # as text, not as what it would be in HTML
    assert page.count("img") == 0
    assert page.driver.title == "tpllama"
    tokens, rate = page.text("#speed").split(", ")[:2]
    assert 1 < int(tokens.removesuffix(" tokens")) <= 40
    assert float(rate.removesuffix(" tokens/s")) > 0

    with server.client() as client:
        body = {"model": "smollm2", "temperature": 0, "max_tokens": 40}
        messages = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": MARKUP},
        ]
        first = client.post("/v1/chat/completions", json=body | {"messages": messages}).json()
        answer = first["choices"][0]["message"]
        assert page.text(".turn.assistant").removeprefix("assistant\n") == answer["content"].strip()
        assert f"prompt of {first['usage']['prompt_tokens']} tokens" in page.text("#speed")
        # The next turn has what was said before, and goes on until it is stopped.
        page.find("#max-tokens").clear()
        page.write("#message", "Count from 1 to 1000, one number a line, and tell me a long story about each.\ue007")
        page.until(lambda: page.text(".turn:last-child").count("\n") > 3)
        page.click("#stop")
        page.until(lambda: page.text("#speed").startswith("stopped; about"))
        page.until(lambda: 'tpllama_running{model="smollm2"} 0.0' in client.get("/metrics").text, within_s=5)
        stopped = page.text(".turn:last-child")
        assert len(stopped) > 20
        assert page.find("#send").is_enabled()
        page.click("#clear")
        assert page.count(".turn") == 0
        # What can't be answered is given back, and said why.
        page.driver.execute_script("document.querySelector('#message').value = 'word '.repeat(10000)")
        page.click("#send")
        page.until(lambda: "8192" in page.text("#chat-error"))
        assert page.count(".turn") == 0
        assert len(page.find("#message").get_property("value")) == 50_000
    assert len(severe(page)) == 1  # that one


def test_models_are_registered_loaded_and_given_up_and_their_plans_seen(page: Page, server: ServerProcess) -> None:
    page.open(server.url)
    page.until(lambda: "loaded" in page.row("smollm2") and page.count("#layers tbody tr"))
    assert page.text("#plan-of") == "of smollm2"
    with server.client() as client:
        plan = client.get("/v1/models/smollm2/plan").json()
        assert f"tp {plan['tp']} (legal: 1 to {plan['legal_tp'][-1]}), recipe none" in page.text("#facts")
        layers = page.cells("#layers")
        assert sum(int(row[1]) for row in layers) == len(plan["layers"])
        assert {row[5] for row in layers} == {"kept"}

        page.write("#new-id", "quantized")
        page.write("#new-path", "smollm2")
        page.write("#new-recipe", "int8wo")
        page.click("#register button")
        page.until(lambda: page.text("#state") == "quantized is loaded")
        assert "registered" in page.row("smollm2")
        page.until(lambda: page.text("#plan-of") == "of quantized" and "int8wo" in page.text("#layers"))
        assert client.get("/v1/models/quantized").json()["custom_metadata"]["torchao_config"] == "int8wo"
        page.until(lambda: page.find("#model").get_property("value") == "quantized")

        page.press("quantized", "unload")
        page.until(lambda: "registered" in page.row("quantized"))
        assert page.text("#state") == "no model is loaded"
        page.press("smollm2", "plan")
        page.until(lambda: page.text("#plan-of") == "of smollm2" and "int8wo" not in page.text("#layers"))
        page.press("quantized", "load")
        page.until(lambda: page.text("#state") == "quantized is loaded")
        page.press("quantized", "unregister")
        page.driver.switch_to.alert.dismiss()
        assert client.get("/v1/models/quantized").status_code == 200
        page.press("quantized", "unregister")
        page.driver.switch_to.alert.accept()
        page.until(lambda: not page.row("quantized"))
        assert client.get("/v1/models/quantized").status_code == 404
        assert not severe(page)

        page.write("#new-id", "nowhere")
        page.click("#register button")
        page.until(lambda: "found no checkpoint" in page.text("#models-error"))
        assert not page.row("nowhere")
        # A message to a model that is not loaded loads it.
        page.write("#max-tokens", "3")
        page.write("#message", "Hello")
        page.click("#send")
        page.until(lambda: "ended by length" in page.text("#speed"))
        page.until(lambda: page.text("#state") == "smollm2 is loaded")


def test_the_page_has_no_data_without_the_key(page: Page, tmp_path: Path) -> None:
    config = write_run_config(tmp_path, "api_key: secret\nmodel_roots: [roots]\nstate_file: state.json\n")
    with ServerProcess("--config", config) as server:
        assert httpx.get(server.url).status_code == 401
        # As behind a gateway that lets the page through; what the page asks for itself needs the key all the same.
        page.driver.execute_cdp_cmd("Network.enable", {})
        page.driver.execute_cdp_cmd("Network.setExtraHTTPHeaders", {"headers": {"Authorization": "Bearer secret"}})
        page.open(server.url)
        page.until(lambda: page.text("#state") == "no model is loaded")
        page.driver.execute_cdp_cmd("Network.setExtraHTTPHeaders", {"headers": {}})
        page.until(lambda: page.text("#state") == "the server asks for its API key")
        page.write("#key", "secret\t")
        page.until(lambda: page.text("#state") == "no model is loaded")
        page.write("#new-id", "smollm2")
        page.click("#new-load")
        page.click("#register button")
        page.until(lambda: "registered" in page.row("smollm2"))
        kept = "return [Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
        assert page.driver.execute_script(kept) == [["secret"], [], ""]
