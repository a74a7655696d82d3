"""`tpllama serve`: flags and run.yaml to a server, or to the part that torchrun's other ranks have in it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpllama.config import EngineConfig
from tpllama.parallel.place import resolve_tp, torchrun_place
from tpllama.server.ranks import ModelRanks, OwnRanks, TorchrunRanks, follow_orders
from tpllama.server.registration import Registration
from tpllama.server.run_config import RunConfig, checked, read_run_config
from tpllama.server.serve import Serving, run
from tpllama.terminal import note

_DEFAULT_MODEL = "smollm2"


def serve(arguments: argparse.Namespace, engine_options: Mapping[str, Any]) -> None:
    """Serves until told to stop; exits with a code of its own where that isn't 0. Raises UserError."""
    place = torchrun_place(os.environ)
    config = settings(arguments)
    engine = engine_of(config, engine_options, resolve_tp(arguments.tp or config.engine.get("tp"), place))
    if not config.allow_hub and not (arguments.model and arguments.model.count("/") == 1):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # names that clients send are not to be looked up there
    ranks: ModelRanks = OwnRanks(arguments.debug)
    if place is not None and place.size > 1:
        from tpllama.parallel.orders import Orders

        orders = Orders(place)
        if place.rank > 0:
            follow_orders(orders, lambda text: note(f"rank {place.rank}: {text}"))
            return
        ranks = TorchrunRanks(orders, place.size)
    trusted = frozenset([arguments.model] if arguments.model else [])
    code = run(Serving(config, engine, trusted, ranks, note, arguments.debug))
    if code:
        sys.exit(code)


def settings(arguments: argparse.Namespace) -> RunConfig:
    """The file's settings, with those of the flags in their place. Without a file: one model, and nothing is kept."""
    config = read_run_config(Path(arguments.config)) if arguments.config else RunConfig()
    models, model = list(config.models), arguments.model
    if model is None and not arguments.config:
        model = arguments.model = _DEFAULT_MODEL
    if model is not None:
        models = [Registration(model_id=model), *(each for each in models if each.model_id != model)]
    flags: dict[str, Any] = {"host": arguments.host, "port": arguments.port, "api_key": arguments.api_key}
    flags |= {"model_roots": arguments.model_root or None, "state_file": arguments.state_file}
    given = {name: value for name, value in flags.items() if value is not None}
    content = config.model_dump() | given | {"models": [each.model_dump() for each in models]}
    return checked(content, "the flags").in_home()


def engine_of(config: RunConfig, flags: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """EngineConfig's fields for all models: the file's, and the flags' that say something else than by default."""
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    given = {name: value for name, value in flags.items() if name != "model" and value != defaults[name]}
    return {**config.engine, **given, "tp": tp}
