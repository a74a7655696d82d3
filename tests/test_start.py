"""A rank's start: ranks that opened different files stop before they load them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tpllama.checkpoint.open import open_checkpoint
from tpllama.config import UserError
from tpllama.start import _check_same_files

CPU = torch.device("cpu")


class Recording:
    """Takes down what a rank says, and answers as if the others had said `others`."""

    def __init__(self, *others: Tensor) -> None:
        self.said: list[Tensor] = []
        self._others = others

    def max(self, x: Tensor) -> Tensor:
        self.said.append(x.clone())
        return torch.stack((x, *self._others)).amax(0)


def said_of(path: Path) -> Tensor:
    ranks: Any = Recording()
    _check_same_files(open_checkpoint(str(path)), ranks, CPU)
    return ranks.said[0]


def test_equal_files_are_the_same_on_all_ranks(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint()
    ranks: Any = Recording(said_of(path), said_of(path))
    _check_same_files(open_checkpoint(str(path)), ranks, CPU)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 3}, {"rms_norm_eps": 1e-4}])
def test_ranks_that_opened_other_files_say_so(make_checkpoint: Callable[..., Path], changes: dict[str, Any]) -> None:
    ours, theirs = make_checkpoint(), make_checkpoint(**changes)
    for path, others in ((ours, [ours, theirs]), (theirs, [ours, ours]), (ours, [theirs, theirs])):
        ranks: Any = Recording(*map(said_of, others))
        with pytest.raises(UserError, match=r"^found that ranks opened different files .*, expected the same on all"):
            _check_same_files(open_checkpoint(str(path)), ranks, CPU)
