"""What each command does: prepare, run, hand the results to the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpllama.config import EngineConfig, UserError
from tpllama.engine.llm import LLM
from tpllama.engine.request import SamplingParams
from tpllama.parallel.launch import Death
from tpllama.parallel.place import resolve_tp, torchrun_place
from tpllama.prepare import Preparation
from tpllama.terminal import InOrder, Summary, human_bytes, note, plan_table, progress_bar, text_of, write

if TYPE_CHECKING:
    from tpllama.blueprint import Blueprint
    from tpllama.engine.text import Prompt


def generate(arguments: argparse.Namespace) -> None:
    """Completes prompts: text to standard output as it comes, a summary line to standard error."""
    params = _sampling(arguments, n=arguments.n, logprobs=arguments.logprobs)
    if params.logprobs is not None and not arguments.json:
        raise UserError("found --logprobs without --json, expected both, for a text has no place for them, add --json")
    with _prepare(arguments) as preparation:
        if preparation.place.rank > 0:
            preparation.load()  # a follower under torchrun: runs, and exits there
        texts = _prompt_texts(arguments)
        use_template = preparation.tokenizer.has_chat_template and not arguments.raw
        prompts = [_prompt(preparation, text, use_template) for text in texts]
        preparation.check(params)
        _say_what_is_loaded(preparation, params)
        llm = LLM.prepared(preparation)
        printer = InOrder(len(prompts), params.n, as_json=arguments.json)
        summary = Summary(sum(len(prompt.token_ids) for prompt in prompts))
        for piece in llm.pieces(prompts, [params] * len(prompts)):
            summary.add(piece)
            printer.add(piece)
        note(summary.line(llm.peak_memory_bytes()))


def chat(arguments: argparse.Namespace) -> None:
    """A conversation: a line of the user, then the assistant's answer, until /exit or the end of input."""
    params = _sampling(arguments)
    with _prepare(arguments) as preparation:
        if preparation.place.rank == 0 and not preparation.tokenizer.has_chat_template:
            raise UserError("found no chat template in the model's tokenizer, expected one, use tpllama generate")
        _say_what_is_loaded(preparation, params)
        llm = LLM.prepared(preparation)
        messages: list[dict[str, Any]] = []
        while (line := _read_line()) not in (None, "/exit"):
            if line == "/reset":
                messages.clear()
            elif line.startswith("/"):
                note(f"found command {line.split()[0]}, expected /reset or /exit")
            elif line:
                _answer(llm, messages, line, params)


def _answer(llm: LLM, messages: list[dict[str, Any]], line: str, params: SamplingParams) -> None:
    messages.append({"role": "user", "content": line})
    text = ""
    try:
        for piece in llm.stream(messages, params):
            text += piece.text
            write(piece.text)
    except UserError as error:
        messages.pop()  # the conversation goes on without what didn't fit
        note(f"error: {error}")
        return
    write("\n")
    messages.append({"role": "assistant", "content": text})


def plan(arguments: argparse.Namespace) -> None:
    """What each layer will become, from config and headers alone."""
    from tpllama.checkpoint.open import open_for
    from tpllama.start import draw_blueprint

    place = torchrun_place(os.environ)
    engine = EngineConfig(tp=resolve_tp(arguments.tp, place), **engine_options(arguments))
    checkpoint = open_for(engine)
    blueprint = draw_blueprint(engine, checkpoint)
    if place is None or place.rank == 0:
        for line in checkpoint.notes:
            note(line)
        report = blueprint.report()
        write(json.dumps(report) + "\n" if arguments.json else plan_table(report))


def quantize(arguments: argparse.Namespace) -> None:
    """Writes a quantized checkpoint. One process does it, whatever the degree: the result is the same at any."""
    from tpllama.checkpoint.open import open_for
    from tpllama.checkpoint.save import checked
    from tpllama.export import export
    from tpllama.start import draw_blueprint

    place = torchrun_place(os.environ)
    degree = resolve_tp(arguments.tp, place)
    if place is not None and place.rank > 0:
        return
    engine = EngineConfig(**engine_options(arguments))
    out = Path(arguments.out)
    checked(out)
    checkpoint = open_for(engine)
    for line in checkpoint.notes:
        note(line)
    blueprint = draw_blueprint(dataclasses.replace(engine, tp=degree), checkpoint)
    _say_quantized(blueprint)
    # As an interrupt does, so that the unfinished folder is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    export(blueprint, checkpoint, out, progress_bar("quantizing"))
    note(f"wrote {out}, {human_bytes(sum(file.stat().st_size for file in out.iterdir()))}")


def serve(arguments: argparse.Namespace) -> None:
    """The HTTP server. Under torchrun the first rank listens, and the others load what it loads."""
    try:
        from tpllama.server import command
    except ImportError as error:
        raise UserError(f"found no {error.name}, expected it for a server, do: pip install 'tpllama[serve]'") from None
    command.serve(arguments, engine_options(arguments))


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What an EngineConfig is made of, but for the degree."""
    fields = {field.name for field in dataclasses.fields(EngineConfig)} - {"tp"}
    return {name: value for name, value in vars(arguments).items() if name in fields}


def _prepare(arguments: argparse.Namespace) -> Preparation:
    return Preparation(tp=arguments.tp, debug=arguments.debug, on_rank_death=end_run, **engine_options(arguments))


def end_run(death: Death) -> None:
    """The last resort, from a thread, where the main one hangs on a dead rank."""
    sys.stderr.write(f"tpllama: error: {death.describe()}\n")
    sys.stderr.flush()
    os._exit(2 if death.user_error else 1)


def _sampling(arguments: argparse.Namespace, **more: Any) -> SamplingParams:
    fields = {field.name for field in dataclasses.fields(SamplingParams)} - {"seed", *more}
    given = {name: value for name, value in vars(arguments).items() if name in fields}
    return SamplingParams(**given, **more)


def _prompt_texts(arguments: argparse.Namespace) -> list[str]:
    texts = list(arguments.prompts)
    if arguments.prompts_file:
        texts += _lines(arguments.prompts_file)
    elif not texts and not sys.stdin.isatty():
        texts = [text] if (text := sys.stdin.read().strip("\n")) else []
    if not texts:
        raise UserError("found no prompt, expected one as an argument, in --prompts-file or on standard input")
    return texts


def _lines(path: str) -> list[str]:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"found {path} unreadable ({error}), expected a text file of prompts, check it") from None
    return [line for line in text.split("\n") if line.strip()]


def _prompt(preparation: Preparation, text: str, use_template: bool) -> Prompt:
    return preparation.chat_prompt([{"role": "user", "content": text}]) if use_template else preparation.prompt(text)


def _say_what_is_loaded(preparation: Preparation, params: SamplingParams) -> None:
    """Before the weights, for nothing is silent. Under torchrun on the first rank alone."""
    if preparation.place.rank == 0:
        for line in preparation.notes:
            note(line)
        places = preparation.blueprint.longest_request
        if params.max_new_tokens > places:
            asked = f"--max-new-tokens {params.max_new_tokens}"
            note(f"{asked} is more than there are places: a text ends where it and its prompt have {places} tokens")
        _say_quantized(preparation.blueprint)
        preparation.progress = progress_bar("loading")


def _say_quantized(blueprint: Blueprint) -> None:
    from tpllama.quantization.report import summarize

    for line in summarize(blueprint.decisions):
        note(line)


def _read_line() -> str | None:
    """The user's next line, None at the end of input."""
    if sys.stdin.isatty():
        write("> ")
    return text_of(sys.stdin.readline())
