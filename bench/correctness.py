"""Whether a model computes what it should, by number: `bench/latency.py --correct`, and with `--against` a verdict.

Printed are, for each prompt, its token ids, the logits after its first --cut-len tokens ("first half") and after all
of it ("final"), and the greedy text. `--against hf` has bench/reference_hf.py compute the same with transformers, on
weights that torchao itself quantized; `--against tp1` has tpllama do it on one rank. The reference scores our texts,
token by token, so that one near tie doesn't make the rest incomparable. Compared are, at every place of prompts and
texts:

    logits   the largest difference, and the root of the mean square, both in standard deviations of the reference's
             logits
    top-1    how often the likeliest token is the same; where it isn't, how far apart the reference has the two
    engine   how far the log-probabilities of the text's tokens are from the reference's: these come from the paged
             cache, a chunk or a token a step, while the logits above come from the forward without a cache

Exits 1 past a tolerance. Plain weights on one rank's CPU give transformers' logits bit for bit, in bfloat16 too where
the CPU has no AMX, for which the kernels are our own. For all else it is a few times what rounding alone was measured
to do on SmolLM2. So a small fault shows in float32, or on one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from answers import Answers, prompts_of, text_of
from command import given, model_name, open_model, recipe_options
from machine_ranks import clean_environment
from record import append, surroundings

from tpllama import LLM, SamplingParams
from tpllama.config import UserError
from tpllama.kernels import amx
from tpllama.kernels.small_m import FEW_ROWS

if TYPE_CHECKING:
    from torch import Tensor

_NEW_TOKENS = 32  # long enough for texts that the library's kernels compute, as those of transformers


def check(arguments: argparse.Namespace) -> None:
    """`--correct`, for every recipe; raises SystemExit(1) where a comparison fails."""
    if arguments.against_model and not arguments.against:
        raise UserError("found --against-model without --against, expected both, add --against hf")
    if (arguments.save_answers or arguments.continue_answers) and len(arguments.torchao_config) > 1:
        raise UserError(f"found {len(arguments.torchao_config)} recipes with an answers file, expected one")
    failed = []
    for recipe in arguments.torchao_config:
        try:
            own = answer(arguments, recipe)
        except SystemExit:  # a follower of torchrun's: its part is done
            if os.environ.get("RANK", "0") == "0":
                raise
            continue
        own.show(arguments.cut_len)
        if arguments.save_answers:
            own.save(arguments.save_answers)
        if arguments.against and not compare(arguments, recipe, own, reference(arguments, recipe, own)):
            failed.append(recipe)
    if failed:
        raise RuntimeError(f"the answers of {', '.join(failed)} are not those of the reference")


def answer(arguments: argparse.Namespace, recipe: str) -> Answers:
    """This program's answers, or its scores of somebody's texts."""
    with ExitStack() as stack:
        changed = {"max_batch_size": given(arguments.max_batch_size, 32)}
        changed["max_batch_tokens"] = given(arguments.max_batch_tokens, 512)
        llm = open_model(arguments, stack, **recipe_options(arguments, recipe), **changed)
        if arguments.continue_answers:
            told = Answers.load(arguments.continue_answers)
            inputs, outputs, logprobs = told.input_ids, told.output_ids, None
        else:
            prompts = prompts_of(arguments.prompt_filename, lambda text: llm.tokenizer.encode(text))
            params = SamplingParams(
                max_new_tokens=(arguments.output_len or [_NEW_TOKENS])[0], logprobs=0, ignore_eos=True
            )
            written = llm.generate(prompts, params)
            inputs, outputs = prompts, [output.token_ids for output in written]
            logprobs = [[each.logprob for each in output.logprobs or ()] for output in written]
        logits = [llm.logits((ids + new)[:-1])[0] for ids, new in zip(inputs, outputs, strict=True)]
        texts = [text_of(llm.tokenizer, ids + new) for ids, new in zip(inputs, outputs, strict=True)]
        return Answers(inputs, outputs, logits, logprobs, texts, **conditions(llm, logits))


def conditions(llm: LLM, logits: list[Tensor]) -> dict[str, Any]:
    """What an Answers says of how it was computed."""
    blueprint, engine = llm.blueprint, llm.blueprint.engine
    recipes = [decision.recipe for decision in blueprint.decisions.values() if decision.recipe]
    is_alone = blueprint.tp == 1 and blueprint.device == "cpu" and engine.compile != "on"
    # Of bfloat16 only enough rows go to the library's kernels, and where a CPU has AMX none do.
    is_library = engine.dtype == "float32" or (min(map(len, logits)) > FEW_ROWS["plain"] and not amx.is_there())
    return {
        "tp": blueprint.tp, "is_dynamic": any(each.family.dynamic for each in recipes),
        "is_plain": not recipes and is_alone and is_library, "is_cache_quantized": engine.kv_cache_dtype != "auto",
    }  # fmt: skip


def reference(arguments: argparse.Namespace, recipe: str, own: Answers) -> Answers:
    """The other side's scores of our texts, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = f"{folder}/ours.safetensors", f"{folder}/theirs.safetensors"
        own.save(ours)
        here = Path(__file__).parent
        program = [str(here / "reference_hf.py")] if arguments.against == "hf" else [
            str(here / "latency.py"), "--correct", "--tp", "1"]  # fmt: skip
        command = [sys.executable, *program, *_same_flags(arguments, recipe)]
        command += ["--continue-answers", ours, "--save-answers", theirs]
        env = clean_environment()  # it isn't one of torchrun's ranks
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            reason = f"signal {-done.returncode}" if done.returncode < 0 or not said else said[-1]
            kind = UserError if done.returncode == 2 else RuntimeError
            raise kind(f"the reference failed: {reason}")
        return Answers.load(theirs)


def _same_flags(arguments: argparse.Namespace, recipe: str) -> Iterator[str]:
    if arguments.shape and not arguments.against_model:
        yield from ("--shape", arguments.shape)
    else:
        yield from ("--model", arguments.against_model or arguments.model)
    yield from ("--torchao-config", recipe)
    for name in ("dtype", "device", "llama_model", "load_format", "seed"):
        value = getattr(arguments, name)
        if value is not None:
            yield from (f"--{name.replace('_', '-')}", str(value))
    if recipe_options(arguments, recipe)["quantize_lm_head"]:
        yield "--quantize-lm-head"
    if arguments.json_model_override_args:
        yield from ("--json-model-override-args", json.dumps(arguments.json_model_override_args))


def compare(arguments: argparse.Namespace, recipe: str, own: Answers, other: Answers) -> bool:
    """Prints by how much two models differ, and whether that is within what rounding does."""
    found = differences(own, other)
    tolerance = own.tolerance(arguments.dtype)
    within = (
        found["largest"] <= tolerance.largest and found["rms"] <= tolerance.rms
        and found["largest_gap"] <= tolerance.gap and found["engine_largest"] <= tolerance.engine
    )  # fmt: skip
    print(
        f"{recipe} against {arguments.against}, {arguments.dtype}: {'the same' if within else 'NOT THE SAME'}\n"
        f"  logits: largest difference {found['largest_logit']:.5f} ({found['largest']:.5f} standard deviations, "
        f"tolerance {tolerance.largest:g}), root mean square {found['rms']:.6f} (tolerance {tolerance.rms:g})\n"
        f"  top-1 agreement: {found['agreed']} of {found['places']} ({found['agreed'] / found['places']:.2%}); the "
        f"reference has tokens that differ at most {found['largest_gap']:.5f} apart (tolerance {tolerance.gap:g})\n"
        f"  engine: log-probabilities of the text's tokens differ by at most {found['engine_largest']:.5f} "
        f"(tolerance {tolerance.engine:g})",
        flush=True,
    )
    if arguments.result_filename:
        reference_model = arguments.against_model and Path(arguments.against_model).name
        facts = {"model": model_name(arguments), "tp": own.tp, "against": arguments.against,
                 "against_model": reference_model, "device": arguments.device, "dtype": arguments.dtype,
                 **recipe_options(arguments, recipe)}  # fmt: skip
        line = {"bench": "correct", **surroundings(), "run_name": arguments.run_name, **facts, **found}
        append(arguments.result_filename, {**line, "same": within})
    return within


def differences(own: Answers, other: Answers) -> dict[str, Any]:
    """Figures of both sides' logits at the same places (see the top of this file)."""
    import torch

    ours, theirs = torch.cat(own.logits), torch.cat(other.logits)
    spread = theirs.std(dim=-1, keepdim=True)
    off = (ours - theirs).abs()
    tops = ours.argmax(-1), theirs.argmax(-1)
    gaps = (theirs.amax(-1) - theirs.gather(-1, tops[0][:, None])[:, 0]).max()
    engine = 0.0
    for ids, new, logits, logprobs in zip(
        own.input_ids, own.output_ids, other.logits, own.logprobs or [[]] * len(own.input_ids), strict=True
    ):
        if logprobs:
            rows = logits[len(ids) - 1 :].log_softmax(-1)
            right = rows.gather(-1, torch.tensor(new)[:, None])[:, 0]
            engine = max(engine, float((torch.tensor(logprobs) - right).abs().max()))
    return {
        "largest_logit": float(off.max()), "largest": float((off / spread).max()),
        "rms": float((off / spread).square().mean().sqrt()), "agreed": int((tops[0] == tops[1]).sum()),
        "places": len(ours), "largest_gap": float(gaps), "engine_largest": engine,
    }  # fmt: skip
