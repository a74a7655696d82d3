"""Keeping libraries' warnings off the user's terminal; `--debug` leaves them on."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_libraries() -> None:
    """To be called before torch, torchao and transformers are imported."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Our own reports don't go through logging, and torchao and torch warn on loggers of many names.
    logging.disable(logging.CRITICAL)
