"""Open-loop load on a running OpenAI-compatible server: latencies of the stream, throughput and goodput.

    python bench/serving.py [--base-url http://127.0.0.1:8321] [--model M] [--api-key K] [--num-requests 64]
        [--request-rate R] [--burstiness B] [--max-concurrency C] [--input-len 128] [--output-len 64] [--ignore-eos]
        [--prompts-file F] [--goodput ttft:MS tpot:MS e2el:MS] [--num-warmups N] [--timeout-s S] [--seed N]
        [--vocab-size N] [--extra-body JSON] [--run-name S] [--result-filename F]

Open loop: requests arrive at --request-rate a second (Poisson; --burstiness below 1 has them come in bursts, above 1
more evenly; inf: all at once) whether or not the server keeps up. Prompts are random token ids for /v1/completions, or
the lines of a file, over and over, for /v1/chat/completions; texts are greedy. Each run draws new prompts and arrivals,
as a server may remember prompts; --seed N repeats those of a run. All times are the client's, which shares the machine
with a local server. With --max-concurrency a request that is due may wait here; that counts as the server's time:

    ttft      from the arrival (when the request was due) to the first event with some of the text; "from sending" is
              what other benches call TTFT, and leaves out what the request waited in the client
    e2el      from the arrival to the end of the answer, and from sending
    tpot      of each request, from its first event with text to its last, by the tokens after the first
    itl       each gap between events with text, of all requests together; some servers send several tokens in an event,
              and none where characters aren't whole (--extra-body '{"return_token_ids": true}' has tpllama send each)
    sent late from the arrival to sending: waiting for --max-concurrency, or a client that can't keep up
    /s        of answered requests, by the time from the first arrival to the last answer's end
    goodput   share of all requests, failed ones included, that kept every limit given, from the arrival

Percentiles are interpolated. Failed requests are counted by kind and are in no latency. The record is printed as one
JSON line. Exit codes as of tpllama; 1 where no request was answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import resource
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from batch_latency import percentile
from command import count, run
from record import append, surroundings
from serving_client import Answer, Client, arrivals, message_of

from tpllama.cli import Parser
from tpllama.config import UserError

_WARM_UP_TOKENS = 8
_ROWS = {
    "ttft_ms": "ttft", "ttft_from_sending_ms": "  from sending", "e2el_ms": "e2el",
    "e2el_from_sending_ms": "  from sending", "tpot_ms": "tpot", "itl_ms": "itl", "send_delay_ms": "sent late",
}  # fmt: skip
_RATES = ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s")


def parser() -> Parser:
    parser = Parser(prog="serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8321", metavar="URL")
    add("--api-key", metavar="K")
    add("--model", metavar="M", help="default: the first that the server lists")
    add("--num-requests", type=count, default=64, metavar="N")
    add("--request-rate", type=_positive, default=math.inf, metavar="R", help="a second; inf (default): all at once")
    add("--burstiness", type=_positive, default=1.0, metavar="B", help="shape of the gaps' gamma distribution")
    add("--max-concurrency", type=count, metavar="C", help="requests under way at once; default: any number")
    add("--input-len", type=count, default=128, metavar="I")
    add("--output-len", type=count, default=64, metavar="O", help="at most; with --ignore-eos exactly")
    add("--vocab-size", type=count, default=32000, metavar="N", help="random token ids are below it")
    add("--prompts-file", metavar="F", help="one prompt a line, asked as a chat")
    add("--ignore-eos", action="store_true", help="ask for texts of full length (tpllama, vLLM, SGLang)")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="more fields of each request")
    add("--goodput", type=_limit, nargs="+", metavar="NAME:MS", help="limits: ttft:MS tpot:MS e2el:MS")
    add("--num-warmups", type=int, default=1, metavar="N", help="short requests before, which must succeed")
    add("--timeout-s", type=_positive, default=600.0, metavar="S", help="of each request, from sending")
    add("--seed", type=int, metavar="N", help="default: another for each run, told in the record")
    add("--run-name", default="default", metavar="S")
    add("--result-filename", metavar="F", help="the JSON line is appended to it")
    add("--debug", action="store_true", help="tracebacks")
    return parser


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number above 0")
    return number


def _limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}, expected ttft:MS, tpot:MS or e2el:MS")
    return name, _positive(limit)


def work(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.num_warmups <= 1 << 10:
        raise UserError(f"found --num-warmups {arguments.num_warmups}, expected 0 to 1024")
    if not isinstance(arguments.extra_body, dict):
        raise UserError(f"found --extra-body {json.dumps(arguments.extra_body)[:40]}, expected a JSON object")
    if math.inf in (arguments.burstiness, arguments.timeout_s):
        raise UserError("found inf for --burstiness or --timeout-s, expected a number")
    if arguments.seed is None:
        arguments.seed = secrets.randbits(32)
    prompts = prompts_of(arguments)
    asyncio.run(measure(arguments, prompts))


def prompts_of(arguments: argparse.Namespace) -> list[str] | list[list[int]]:
    """Texts of the file, or random ids, one for each request."""
    if not arguments.prompts_file:
        draw = random.Random(f"{arguments.seed} prompts")
        ids = range(arguments.vocab_size)
        return [draw.choices(ids, k=arguments.input_len) for _ in range(arguments.num_requests)]
    try:
        lines = Path(arguments.prompts_file).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"found {arguments.prompts_file} unreadable ({error}), expected a text file") from None
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise UserError(f"found no prompt in {arguments.prompts_file}, expected one a line")
    return [texts[number % len(texts)] for number in range(arguments.num_requests)]


def body_of(arguments: argparse.Namespace, model: str, prompt: str | list[int], max_tokens: int) -> bytes:
    asked = {"messages": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else {"prompt": prompt}
    same = {"max_tokens": max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    more = ({"ignore_eos": True} if arguments.ignore_eos else {}) | arguments.extra_body
    return json.dumps({"model": model, **asked, **same, **more}).encode()


async def measure(arguments: argparse.Namespace, prompts: Sequence[str | list[int]]) -> None:
    url = arguments.base_url.rstrip("/").removesuffix("/v1")
    headers = {"Content-Type": "application/json"}
    if arguments.api_key:
        headers["Authorization"] = f"Bearer {arguments.api_key}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    route = "/v1/chat/completions" if arguments.prompts_file else "/v1/completions"
    try:
        http = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise UserError(f"found --base-url or --api-key unusable ({error}), expected others") from None
    async with http:
        served = await served_model(http, arguments)
        model = arguments.model or served["id"]
        await warm_up(Client(http, route, arguments.timeout_s), arguments, model)
        allow_connections()
        client = Client(http, route, arguments.timeout_s)
        bodies = [body_of(arguments, model, prompt, arguments.output_len) for prompt in prompts]
        due = arrivals(arguments.num_requests, arguments.request_rate, arguments.burstiness, f"{arguments.seed} gaps")
        answers = await client.load(bodies, due, arguments.max_concurrency)
    record = {
        **describe(arguments, model, served, route), **figures(answers, dict(arguments.goodput or ())),
        "most_in_flight": client.most_in_flight,
    }  # fmt: skip
    report(record, answers)
    print(json.dumps(record), flush=True)
    if arguments.result_filename:
        append(arguments.result_filename, record)
    if not record["completed"]:
        raise RuntimeError(f"none of {len(answers)} requests was answered: {answers[0].error}: {answers[0].message}")


def allow_connections() -> None:
    """As many open connections as the system lets us have: the usual limit is 1024 files."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def served_model(http: httpx.AsyncClient, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the server lists of the model that is asked for, or of its first. Raises UserError where there is none."""
    url = arguments.base_url
    try:
        reply = await http.get("/v1/models", timeout=20)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"found no server at {url} ({error or type(error).__name__}), expected one that answers, start it or name "
            f"another --base-url"
        ) from None
    if reply.status_code != 200:
        hint = ", check --api-key" if reply.status_code in (401, 403) else ""
        raise UserError(
            f"found HTTP {reply.status_code} for {url}/v1/models ({message_of(reply.content)}), expected a list{hint}"
        )
    try:
        listed: dict[str, dict[str, Any]] = {each["id"]: each for each in reply.json()["data"]}
    except (ValueError, LookupError, TypeError):
        raise UserError(f"found no list of models at {url}, expected an OpenAI-compatible server") from None
    name = arguments.model or next(iter(listed), "")
    if name not in listed:
        raise UserError(f"found {name or 'no model'} at {url}, expected one of those it lists: {', '.join(listed)}")
    return listed[name]


async def warm_up(client: Client, arguments: argparse.Namespace, model: str) -> None:
    """A few tokens, on prompts of their own. Raises where the server can't do it."""
    draw, few = random.Random(), min(_WARM_UP_TOKENS, arguments.output_len)
    for _ in range(arguments.num_warmups):
        ids = draw.choices(range(arguments.vocab_size), k=arguments.input_len)
        prompt = "Count to ten." if arguments.prompts_file else ids
        (answer,) = await client.load([body_of(arguments, model, prompt, few)], [0.0], None)
        if answer.error:
            said = f"{answer.error} for the warm-up ({answer.message})"
            if answer.error.startswith("HTTP 4"):
                raise UserError(f"found {said}, expected an answer, ask for what the server can do")
            raise RuntimeError(said)


def figures(answers: Sequence[Answer], limits: dict[str, float]) -> dict[str, Any]:
    """What the record says of the answers; `limits` in milliseconds, by name."""
    done = [answer for answer in answers if answer.error is None]
    seconds = max(answer.ended for answer in answers)
    tokens = [sum(answer.prompt_tokens for answer in done), sum(answer.completion_tokens for answer in done)]
    counts = (len(done), *tokens, sum(tokens))
    last = answers[-1].arrival
    times = {
        "ttft_ms": [answer.ttft for answer in done],
        "ttft_from_sending_ms": [answer.ttft - answer.send_delay for answer in done],
        "e2el_ms": [answer.e2el for answer in done],
        "e2el_from_sending_ms": [answer.e2el - answer.send_delay for answer in done],
        "tpot_ms": [answer.tpot for answer in done if answer.tpot is not None],
        "itl_ms": [gap for answer in done for gap in answer.gaps],
        "send_delay_ms": [answer.send_delay for answer in answers],
    }
    kept = sum(keeps(answer, limits) for answer in done) if limits else None
    return {
        "completed": len(done), "failed": len(answers) - len(done),
        "errors": dict(Counter(answer.error for answer in answers if answer.error)), "seconds": round(seconds, 4),
        "arrivals_per_s": round((len(answers) - 1) / last, 3) if last else None,
        "prompt_tokens": tokens[0], "completion_tokens": tokens[1],
        **{name: round(number / seconds, 3) for name, number in zip(_RATES, counts, strict=True)},
        **{name: summary(values) for name, values in times.items()},
        "goodput": None if kept is None else round(kept / len(answers), 4),
        "good_requests_per_s": None if kept is None else round(kept / seconds, 3),
    }  # fmt: skip


def keeps(answer: Answer, limits: dict[str, float]) -> bool:
    """Whether an answer was in time. One token has no time per further token, and keeps that limit."""
    return all((getattr(answer, name) or 0.0) * 1e3 <= limit for name, limit in limits.items())


def summary(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None of nothing."""
    if not seconds:
        return None
    found = {"mean": fmean(seconds)} | {f"p{percent}": percentile(seconds, percent) for percent in (50, 90, 99)}
    return {name: round(value * 1e3, 3) for name, value in found.items()}


def describe(arguments: argparse.Namespace, model: str, served: dict[str, Any], route: str) -> dict[str, Any]:
    """What was asked, of what. Machine and versions are the client's."""
    same = ("num_requests", "burstiness", "max_concurrency", "output_len", "ignore_eos", "extra_body", "num_warmups",
            "timeout_s", "seed")  # fmt: skip
    is_chat = bool(arguments.prompts_file)
    return {
        "bench": "serving", "run_name": arguments.run_name, **surroundings(), "model": Path(model).name,
        "server": served.get("owned_by"), "torchao_config": (served.get("custom_metadata") or {}).get("torchao_config"),
        "route": route, "prompts_file": Path(arguments.prompts_file).name if is_chat else None,
        "input_len": None if is_chat else arguments.input_len,
        "vocab_size": None if is_chat else arguments.vocab_size,
        "request_rate": "inf" if math.isinf(arguments.request_rate) else arguments.request_rate,
        **{name: getattr(arguments, name) for name in same}, "goodput_limits_ms": dict(arguments.goodput or ()),
    }  # fmt: skip


def report(record: dict[str, Any], answers: Sequence[Answer]) -> None:
    asked = f"{record['input_len']} + {record['output_len']} tokens" if record["input_len"] else record["prompts_file"]
    rate = f"rate {record['request_rate']}"
    if record["arrivals_per_s"]:
        rate += f" (drawn: {record['arrivals_per_s']:.2f})"
    print(f"{record['model']}: {record['completed']} of {len(answers)} requests answered in {record['seconds']:.2f} s; "
          f"{asked}, {rate}, at most {record['most_in_flight']} under way")  # fmt: skip
    for kind, number in record["errors"].items():
        message = next(answer.message for answer in answers if answer.error == kind)
        print(f"{number:>7}  failed: {kind}: {message}")
    print(f"{'requests/s':>12}{'input/s':>12}{'output/s':>12}{'total/s':>12}")
    print("".join(f"{record[name]:12.2f}" for name in _RATES))
    print(f"{'milliseconds':<16}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}")
    for name, title in _ROWS.items():
        numbers = record[name].values() if record[name] else ()
        print(f"{title:<16}" + ("".join(f"{number:10.2f}" for number in numbers) or f"{'-':>10}"))
    if record["goodput"] is not None:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in record["goodput_limits_ms"].items())
        print(f"goodput ({limits} ms): {record['goodput']:.2%}, {record['good_requests_per_s']:.2f} requests/s")


if __name__ == "__main__":
    run("serving", parser(), work)
