"""The command line: arguments to one EngineConfig and a command; errors to one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tpllama import __version__
from tpllama.config import DTYPES, KV_CACHE_DTYPES, UserError
from tpllama.quantization.recipes import RECIPES
from tpllama.quiet import quiet_libraries

_RECIPES = f"a quantization recipe: {', '.join(RECIPES)} (default none), or @file.json: module names to recipe"
_COMPILE = "on: torch.compile each layer; auto (default): only record a GPU's steps as graphs; off: neither"


class Parser(argparse.ArgumentParser):
    """argparse with our form of error: one line, exit code 2. Flags must be spelled out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        lacking = message.removeprefix("the following arguments are required: ")
        if lacking != message:
            raise UserError(f"found no {lacking}, expected it, see {self.prog} --help")
        raise UserError(f"found {message}, expected the options of {self.prog}, see {self.prog} --help")


def main(argv: list[str] | None = None) -> NoReturn:
    """The program. Exits 0 when done, 1 for a failure at run time, 2 for what the user gave."""
    end(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Runs one command and returns its exit code."""

    def command() -> None:
        arguments = build_parser().parse_args(argv)
        from tpllama import commands

        getattr(commands, arguments.command)(arguments)

    return guarded("tpllama", command, is_debug="--debug" in argv)


def guarded(program: str, work: Callable[[], None], is_debug: bool) -> int:
    """Does the work and returns the program's exit code; what goes wrong is one line on standard error."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if not is_debug:
        quiet_libraries()
    was_interrupted = False

    def interrupt(*_: object) -> NoReturn:
        nonlocal was_interrupted
        was_interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        work()
    except UserError as error:
        return _complain(program, error, 2, is_debug)
    except KeyboardInterrupt:
        return 130
    except SystemExit as left:  # --help, and a follower's end
        return int(left.code or 0)
    except BrokenPipeError:
        # The reader of our output is gone; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the program's boundary: any failure is one line
        if was_interrupted:  # in the middle of an import, whose failure this is then
            return 130
        return _complain(program, error, 1, is_debug)
    return 0


def end(code: int) -> NoReturn:
    """Ends the process without the interpreter's teardown: threads of libraries may outlive it and abort."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = code or 1
    os._exit(code)


def _complain(program: str, error: Exception, code: int, is_debug: bool) -> int:
    if is_debug:
        import traceback

        traceback.print_exc()
    # What the user gave is wrong on every rank alike: only the first says so. A failure is a rank's own, and that ranks
    # of other hosts are lost is said on each host.
    rank = os.environ.get("RANK", "0") if "WORLD_SIZE" in os.environ else "0"
    is_loss = type(error).__name__ == "RankLost"
    is_own = code == 1 or getattr(error, "rank", None) is not None
    if rank == "0" or (is_own and (not is_loss or os.environ.get("LOCAL_RANK") == "0")):
        text = " ".join(str(error).split()) or type(error).__name__
        whose = f"rank {rank} failed: " if rank != "0" else ""
        with contextlib.suppress(OSError):  # whose reader may be gone
            sys.stdout.flush()  # what was said before comes before
        print(f"{program}: error: {whose}{text}", file=sys.stderr, flush=True)
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tpllama", description="A Llama, sharded with DTensor, quantized with torchao.")
    parser.add_argument("--version", action="version", version=f"tpllama {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    generate = commands.add_parser("generate", help="complete prompts, or answer them where the model has a template")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="without any, standard input is the prompt")
    generate.add_argument("--prompts-file", metavar="FILE", help="one prompt a line; - is standard input")
    generate.add_argument("--raw", action="store_true", help="no chat template")
    generate.add_argument("--n", type=int, default=1, metavar="N", help="samples per prompt")
    generate.add_argument("--logprobs", type=int, metavar="K", help="with --json: the K likeliest tokens at each place")
    generate.add_argument("--json", action="store_true", help="one JSON object a line per text")
    chat = commands.add_parser("chat", help="a conversation in the terminal (/reset, /exit)")
    plan = commands.add_parser("plan", help="what each layer will become, before any weight is read")
    plan.add_argument("--json", action="store_true", help="one JSON object")
    quantize = commands.add_parser("quantize", help="write a quantized checkpoint, for any --tp and for transformers")
    quantize.add_argument("model", metavar="MODEL", help="directory, .gguf file, hub id org/name, or smollm2")
    quantize.add_argument("out", metavar="OUT", help="a new directory")
    serve = commands.add_parser("serve", help="OpenAI's and llama-stack's HTTP routes")
    _add_serving(serve)
    for command in (generate, chat):
        _add_sampling(command)
    for command in (generate, chat, plan, serve):
        add_cache(command)
        default = None if command is serve else "smollm2"
        command.add_argument(
            "--model", default=default, metavar="M", help="directory, .gguf file, hub id org/name, or smollm2"
        )
    for command in (generate, chat, plan, quantize, serve):
        add_common(command)
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--llama-model", metavar="BASE", help="the model that M was fine-tuned from, for what M lacks of it")
    add("--tp", type=int, metavar="N", help="ranks that share the model (1); under torchrun its world")
    add("--torchao-config", default="none", metavar="R", help=_RECIPES)
    add("--quantize-lm-head", action="store_true", help="quantize the output head too")
    add("--dtype", default="bfloat16", choices=DTYPES, help="of activations and plain weights (bfloat16)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: a GPU where there is one (default)")
    add("--max-seq-len", type=int, metavar="N", help="tokens of prompt and answer together (the model's most)")
    add("--seed", type=int, default=0, metavar="N", help="of what is drawn, and of dummy weights (0)")
    add("--compile", default="auto", choices=("auto", "on", "off"), help=_COMPILE)
    add("--json-model-override-args", type=_json_object, metavar="JSON", help="merged into the model's config")
    add("--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights from config.json alone")
    add("--batch-invariant", action="store_true", help="a text does not depend on its company, bit for bit")
    add(
        "--strict",
        action="store_true",
        help="a layer that can't be quantized as asked, or a weight that is no finite number, is an error",
    )
    add("--debug", action="store_true", help="tracebacks, and warnings of libraries")


def add_cache(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kv-cache-memory", type=_size, metavar="SIZE", help="of each rank's keys and values: bytes, or as 512MiB")
    add("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="auto: the model's")
    add("--block-size", type=int, metavar="N", help="tokens in a block of the cache (16; 256 on GPUs)")
    add("--swap-memory", type=_size, metavar="SIZE", help="of each rank's host, for preempted requests (4GiB on GPUs)")
    add("--max-batch-size", type=int, default=32, metavar="N", help="texts in one step (32)")
    add("--max-batch-tokens", type=int, default=512, metavar="N", help="tokens in one step (512)")
    add("--no-prefix-caching", dest="prefix_caching", action="store_false", help="compute each prompt as a whole")
    add("--no-chunked-prefill", dest="chunked_prefill", action="store_false", help="compute each prompt in one step")


def _add_serving(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", metavar="FILE", help="run.yaml: models, where they may lie, limits; flags win over it")
    add("--host", metavar="H", help="address to listen on (127.0.0.1)")
    add("--port", type=int, metavar="N", help="8321; 0: any that is free")
    add("--api-key", metavar="KEY", help="what 'Authorization: Bearer KEY' must say")
    add("--model-root", action="append", default=[], metavar="DIR", help="where models may lie (repeatable)")
    add("--state-file", metavar="FILE", help="keeps what is registered over HTTP")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-new-tokens", type=int, default=256, metavar="N", help="the text ends after so many (256)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
    add("--top-p", type=float, default=1.0, metavar="P", help="of the likeliest tokens that have P together (1: off)")
    add("--top-k", type=int, default=0, metavar="K", help="of the K likeliest tokens (0: off)")
    add("--min-p", type=float, default=0.0, metavar="P", help="of tokens with P times the likeliest's (0: off)")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="for tokens in prompt or text (1: off)")
    add("--presence-penalty", type=float, default=0.0, metavar="P", help="off the logit of tokens that the text has")
    add("--frequency-penalty", type=float, default=0.0, metavar="P", help="the same, for each time")
    add("--min-tokens", type=int, default=0, metavar="N", help="the text doesn't end before")
    add("--json-schema", type=_text_or_file, metavar="JSON", help="the text is JSON of this schema (@FILE reads it)")
    add("--regex", metavar="R", help="the text matches a regular expression")
    add("--grammar", type=_text_or_file, metavar="G", help="the text is of this Lark grammar (@FILE reads it)")
    add("--stop", action="append", default=[], metavar="S", help="a text that ends the output (repeatable)")
    add("--ignore-eos", action="store_true", help="go on after a token that ends texts")


_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def _size(text: str) -> int:
    """Bytes, from a number with or without a unit."""
    number = text.rstrip(string.ascii_letters)
    unit = text[len(number) :].lower()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"found size {text[:40]!r}, expected bytes or a number with KiB, MiB, GiB, as in 512MiB"
        ) from None


def _text_or_file(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"found {text[1:]} unreadable ({error}), expected a text file") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"found invalid JSON ({error}), expected an object") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"found JSON {text[:40]}, expected an object")
    return value
