"""The frame of a bench's command line: the flags of `tpllama generate` for a model, its errors and its exit codes."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from record import check_writable
from shapes import SHAPES, write_config

from tpllama import LLM
from tpllama.cli import Parser, add_cache, add_common, end, guarded
from tpllama.commands import end_run, engine_options


def parser_for(program: str, documentation: str | None) -> Parser:
    """A parser that knows the flags for model, ranks, weights and cache, and those for results."""
    parser = Parser(
        prog=program, description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # a bench may take a list where a command takes one
    )  # fmt: skip
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="smollm2", metavar="M")
    model.add_argument("--shape", choices=SHAPES, help="a config of this shape, with random weights")
    add_common(parser)
    add_cache(parser)
    parser.add_argument("--run-name", default="default", metavar="S")
    parser.add_argument("--result-filename", metavar="F", help="JSON lines are appended to it")
    return parser


def run(program: str, parser: Parser, work: Callable[[argparse.Namespace], None]) -> NoReturn:
    """Does the work, with the exit codes of `tpllama`: 0 done, 1 a failure at run time, 2 what the user gave."""

    def parsed() -> None:
        arguments = parser.parse_args()
        check_writable(arguments.result_filename)
        work(arguments)

    end(guarded(program, parsed, is_debug="--debug" in sys.argv))


def open_model(arguments: argparse.Namespace, stack: ExitStack, **changed: Any) -> LLM:
    """The model that the flags ask for, closed with the stack. Under torchrun the followers go no further."""
    options = {**engine_options(arguments), **changed}
    if arguments.shape:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        write_config(Path(folder), SHAPES[arguments.shape])
        options |= {"model": folder, "load_format": "dummy"}
    return stack.enter_context(LLM(tp=arguments.tp, debug=arguments.debug, on_rank_death=end_run, **options))


def recipe_options(arguments: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """One of a sweep's recipes as LLM's options; with `none`, which may be among them, there is no head to quantize."""
    is_alone = len(arguments.torchao_config) == 1
    return {"torchao_config": recipe, "quantize_lm_head": arguments.quantize_lm_head and (is_alone or recipe != "none")}


def model_name(arguments: argparse.Namespace) -> str:
    """What results call the model: the shape, or the name without the folders of this machine."""
    return arguments.shape or Path(arguments.model).name


def count(text: str) -> int:
    """An argument that counts something."""
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= 1 << 24:
        raise argparse.ArgumentTypeError(f"found {text[:20]!r}, expected whole numbers from 1 to {1 << 24}")
    return number


def given(value: int | None, default: int) -> int:
    return default if value is None else value
