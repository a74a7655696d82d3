"""Keeping libraries' warnings off the user's terminal; `--debug` leaves them on.

A program of ours silences all of them. In somebody else's, which logs as it likes, the two known ones go.
"""

from __future__ import annotations

import logging
import os
import warnings

# Loggers that say, wherever torchao is imported, what its user can't change, and how those lines begin or go on.
_NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": "Calling register_constant() on Enum subclasses"}


def quiet_imports() -> None:
    """Drops what importing torchao logs. To be called before it is imported; again, it does nothing."""
    for name in _NOISE:
        logging.getLogger(name).addFilter(_is_no_noise)


def _is_no_noise(record: logging.LogRecord) -> bool:
    return _NOISE[record.name] not in record.getMessage()


def quiet_libraries() -> None:
    """To be called before torch, torchao and transformers are imported."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Our own reports don't go through logging, and torchao and torch warn on loggers of many names.
    logging.disable(logging.CRITICAL)
