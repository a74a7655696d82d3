"""One HTTP request for text and its answer, in a client's form: what the service needs to know of either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tpllama.engine.llm import LLM
    from tpllama.engine.request import Output, SamplingParams
    from tpllama.engine.text import Piece, Prompt
    from tpllama.server.errors import ApiError


class Exchange(Protocol):
    """A request that was understood. It has a state of its own: one object serves one request, in one thread.

    model_id: as it was asked for. ends_with_done: whether `data: [DONE]` ends a stream.
    """

    model_id: str
    is_stream: bool
    ends_with_done: bool

    def prepare(self, llm: LLM) -> tuple[list[Prompt], list[SamplingParams]]:
        """What the engine is asked for. Raises UserError or ApiError for what can't be: nothing later does."""

    def on_piece(self, piece: Piece) -> list[dict[str, Any]]:
        """The stream's events that a piece brings, in order."""

    def on_end(self) -> list[dict[str, Any]]:
        """The events after all pieces."""

    def answer(self, outputs: list[Output]) -> dict[str, Any]:
        """The whole answer, where it is not streamed. `outputs` by prompt, then by sample."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """An error in the client's form, as a body or as an event inside a stream."""
