"""The answers that bench/latency.py --correct prints, from transformers: the same prompts, the same layout.

    python bench/reference_hf.py [--model M] [--dtype D] [--torchao-config R] [--quantize-lm-head] [--output-len 16]
        [--cut-len N] [--prompt-filename F] [--device cpu|cuda]

transformers reads the checkpoint itself where it knows its form: its own directories, or a GGUF file. Others (Meta's,
torchtune's, adapters, quantized ones) are read by tpllama's readers, which is said, and computed by transformers.
With a recipe, torchao's own quantize_ makes the weights of the layers that the recipe is for; weight-only ones are
dequantized at once, the others keep torchao's linear, activations and all.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from answers import Answers, prompts_of, text_of
from command import count, parser_for, run

from tpllama.checkpoint.open import Checkpoint, open_for, overridden
from tpllama.cli import Parser
from tpllama.commands import engine_options
from tpllama.config import EngineConfig, UserError
from tpllama.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tpllama.blueprint import Blueprint


def parser() -> Parser:
    parser = parser_for("reference_hf", __doc__)
    add = parser.add_argument
    add("--output-len", "--output", type=count, default=32, metavar="O")
    add("--cut-len", type=count, default=4, metavar="N", help="tokens of a prompt's first half")
    add("--prompt-filename", metavar="F", help="one prompt a line, text or a JSON list of token ids")
    add("--save-answers", metavar="F", help="write the numbers to a safetensors file")
    add("--continue-answers", metavar="F", help="score these texts instead of writing own ones")
    return parser


def work(arguments: argparse.Namespace) -> None:
    import torch

    from tpllama.start import draw_blueprint

    if arguments.shape or arguments.tp not in (None, 1):
        raise UserError("found --shape or --tp, expected neither: transformers computes real weights on one rank")
    engine = EngineConfig(**engine_options(arguments))
    checkpoint = open_for(engine)
    tokenizer = Tokenizer(checkpoint.tokenizer())
    blueprint = draw_blueprint(engine, checkpoint)
    model = reference_model(blueprint, checkpoint)
    limits = (blueprint.context_length, blueprint.config.vocab_size)
    with torch.inference_mode():
        answers = answer(model, tokenizer, arguments, limits)
    answers.show(arguments.cut_len)
    if arguments.save_answers:
        answers.save(arguments.save_answers)


def answer(model: Any, tokenizer: Tokenizer, arguments: argparse.Namespace, limits: tuple[int, int]) -> Answers:
    """Greedy texts, or somebody's, with the logits at each place. limits: on length and token ids."""
    import torch

    from tpllama.engine.engine import check_prompt

    if arguments.continue_answers:
        told = Answers.load(arguments.continue_answers)
        inputs, outputs = told.input_ids, told.output_ids
    else:
        inputs = prompts_of(arguments.prompt_filename, tokenizer.encode)
        length, vocab_size = limits
        outputs = []
        for ids in inputs:
            check_prompt(ids, length, vocab_size)
            count = min(arguments.output_len, length - len(ids))
            given = torch.tensor([ids], device=model.device)
            options: dict[str, Any] = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count}
            new = model.generate(given, attention_mask=torch.ones_like(given), **options)[0, len(ids) :]
            outputs.append(new.tolist())
    rows = [(ids + new)[:-1] for ids, new in zip(inputs, outputs, strict=True)]
    logits = [model(torch.tensor([row], device=model.device)).logits[0].float().cpu() for row in rows]
    texts = [text_of(tokenizer, ids + new) for ids, new in zip(inputs, outputs, strict=True)]
    return Answers(inputs, outputs, logits, None, texts)


def reference_model(blueprint: Blueprint, checkpoint: Checkpoint) -> Any:
    """transformers' LlamaForCausalLM with the weights that were asked for."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tpllama.start import resolve_device

    engine = blueprint.engine
    config = LlamaConfig(**overridden(checkpoint, engine.json_model_override_args))
    config.quantization_config = None
    dtype = blueprint.dtype
    if engine.load_format == "dummy":
        raise UserError("found --load-format dummy, expected real weights: transformers would make up others")
    path = checkpoint.path
    is_theirs = path.is_dir() and (path / "config.json").exists() and not checkpoint.quantized
    if path.suffix == ".gguf" and path.is_file():
        model = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=dtype)
    elif is_theirs and checkpoint.base_path is None:
        model = LlamaForCausalLM.from_pretrained(path, config=config, dtype=dtype)
    else:
        print(f"(transformers doesn't read the form of {path.name}: read by tpllama, computed by transformers)")
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
        fill(model, plain_weights(blueprint, checkpoint), set(checkpoint.quantized) | {"lm_head.weight"})
    quantize(model, blueprint, checkpoint)
    return model.eval().to(resolve_device(engine.device))


def plain_weights(blueprint: Blueprint, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors that aren't quantized, by Hugging Face's name."""
    tied = {"lm_head.weight"} if blueprint.config.tie_word_embeddings else set()
    names = [name for name in blueprint.shapes if name not in checkpoint.quantized and name not in tied]
    return {name: whole(checkpoint, name).to(blueprint.dtype) for name in names}


def fill(model: nn.Module, weights: dict[str, torch.Tensor], later: set[str]) -> None:
    """Loads the weights: all but those that come later, or are the embedding's."""
    missing, extra = model.load_state_dict(weights, strict=False)
    if extra or set(missing) - later:
        raise RuntimeError(f"found weights {extra} and none for {missing}, expected transformers' own names")


def whole(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return checkpoint.read(name, tuple(slice(0, size) for size in checkpoint.tensors[name].shape)).clone()


def quantize(model: nn.Module, blueprint: Blueprint, checkpoint: Checkpoint) -> None:
    """Quantizes the linears that the recipe is for, by torchao; those stored quantized are put together as stored."""
    import torch
    from torchao.quantization import quantize_

    from tpllama.kernels.linear import dequantize

    for name, decision in blueprint.decisions.items():
        recipe, linear = decision.recipe, model.get_submodule(name)
        if recipe is None:
            continue
        if stored := blueprint.stored.get(f"{name}.weight"):
            rows, columns = (slice(0, size) for size in stored.shape)
            parts = checkpoint.quantized[f"{name}.weight"].parts
            read = {part: whole(checkpoint, parts[part]) for part in stored.slices(rows, columns)}
            weight: Any = stored.assemble(read, blueprint.dtype)
        else:
            plain = torch.nn.Linear(*reversed(linear.weight.shape), bias=False, dtype=blueprint.dtype)
            plain.weight = torch.nn.Parameter(linear.weight.detach().clone())  # a tied one stays as the embedding is
            quantize_(plain, recipe.config())
            weight = plain.weight
        if not recipe.family.dynamic:
            weight = dequantize(weight)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)


if __name__ == "__main__":
    run("reference_hf", parser(), work)
