"""The routes of models and of text, each a few lines to what serves it."""

# No postponed annotations: FastAPI reads them, also those of local names.
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.responses import Response

from tpllama.server.exchange import Exchange
from tpllama.server.llama_stack_chat import StackChatExchange
from tpllama.server.llama_stack_completion import StackCompletionExchange
from tpllama.server.llama_stack_forms import (
    StackBatchChatRequest,
    StackBatchCompletionRequest,
    StackChatRequest,
    StackCompletionRequest,
)
from tpllama.server.models import Models
from tpllama.server.openai_chat import ChatExchange, ChatRequest
from tpllama.server.openai_completion import CompletionExchange, CompletionRequest
from tpllama.server.registration import Registration
from tpllama.server.reply import JsonResponse, Reply
from tpllama.server.service import Service

Force = Annotated[bool, Query(description="Whether its running requests are cancelled.")]
Report = Callable[[Exception], None]


def models_router(models: Models) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["models"])

    @router.get("/models")
    @router.get("/openai/v1/models", include_in_schema=False)
    async def list_models() -> Response:
        return JsonResponse({"object": "list", "data": models.listed()})

    @router.post("/models")
    async def register_model(registration: Registration) -> Response:
        return JsonResponse((await models.register(registration)).as_listed())

    @router.post("/models/{model_id:path}/load")
    async def load_model(model_id: str) -> Response:
        return JsonResponse((await models.load(model_id)).as_listed())

    @router.post("/models/{model_id:path}/unload")
    async def unload_model(model_id: str, force: Force = False) -> Response:
        return JsonResponse((await models.unload(model_id, force)).as_listed())

    @router.get("/models/{model_id:path}/plan")
    async def plan_of_model(model_id: str) -> Response:
        return JsonResponse(await models.plan(model_id))

    @router.get("/models/{model_id:path}")
    @router.get("/openai/v1/models/{model_id:path}", include_in_schema=False)
    async def get_model(model_id: str) -> Response:
        return JsonResponse(models.get(model_id))

    @router.delete("/models/{model_id:path}", status_code=204, response_class=Response)
    async def unregister_model(model_id: str, force: Force = False) -> Response:
        await models.unregister(model_id, force)
        return Response(status_code=204)

    return router


def inference_router(service: Service, report: Report) -> APIRouter:
    router = APIRouter(tags=["text"])

    def add(path: str, request_type: type[BaseModel], exchange: Callable[[Any], Exchange], summary: str) -> None:
        async def serve(request: request_type) -> Response:  # type: ignore[valid-type]
            return Reply(service, exchange(request), report)

        kinds = ["application/json", *(["text/event-stream"] if "stream" in request_type.model_fields else [])]
        told: dict[int | str, dict[str, Any]] = {200: {"content": {kind: {} for kind in kinds}}}
        name = path.removeprefix("/").replace("/", "_")
        router.add_api_route(path, serve, methods=["POST"], summary=summary, name=name, responses=told)

    def chat_of_stack(request: ChatRequest) -> Exchange:
        return ChatExchange(request, ends_with_done=False)

    def completion_of_stack(request: CompletionRequest) -> Exchange:
        return CompletionExchange(request, ends_with_done=False)

    as_openai = "As OpenAI's route, for clients of llama-stack 0.2"
    add("/v1/chat/completions", ChatRequest, ChatExchange, "An answer to a conversation")
    add("/v1/completions", CompletionRequest, CompletionExchange, "Texts that go on from prompts")
    add("/v1/openai/v1/chat/completions", ChatRequest, chat_of_stack, as_openai)
    add("/v1/openai/v1/completions", CompletionRequest, completion_of_stack, as_openai)
    inference = "/v1/inference"
    add(f"{inference}/chat-completion", StackChatRequest, StackChatExchange, "An answer, in llama-stack 0.2's form")
    add(f"{inference}/completion", StackCompletionRequest, StackCompletionExchange, "A text that goes on")
    add(
        f"{inference}/batch-chat-completion", StackBatchChatRequest, StackChatExchange, "An answer to each conversation"
    )
    add(
        f"{inference}/batch-completion", StackBatchCompletionRequest, StackCompletionExchange, "A text from each prompt"
    )

    @router.post("/v1/chat/completions/validate", summary="The checks alone: how many tokens, or the error")
    async def validate(request: ChatRequest) -> Response:
        exchange = ChatExchange(request)
        await service.check(exchange)
        return JsonResponse(exchange.limits())

    return router
