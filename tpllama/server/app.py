"""The HTTP application: routes, and how errors are told. What is behind them is in service.py and models.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from tpllama.config import UserError
from tpllama.server.errors import ApiError, as_api_error, validation_error
from tpllama.server.gate import error_body
from tpllama.server.metrics import Metrics
from tpllama.server.models import Models
from tpllama.server.reply import JsonResponse, error_response
from tpllama.server.routes import inference_router, models_router
from tpllama.server.service import Service
from tpllama.server.switch import Switch

_PAGE = "page.html"


def make_app(
    service: Service, models: Models, switch: Switch, metrics: Metrics, report: Callable[[Exception], None]
) -> FastAPI:
    """The application. `report` is told of errors that nobody foresaw."""
    app = FastAPI(title="tpllama", version="1", description="OpenAI's and llama-stack's routes over a sharded Llama.")
    app.include_router(_state_router(switch, metrics))
    app.include_router(models_router(models))
    app.include_router(inference_router(service, report))
    app.openapi = functools.partial(_schema, app, app.openapi)  # type: ignore[method-assign]

    @app.exception_handler(ApiError)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(UserError)
    @app.exception_handler(Exception)
    async def tell(request: Request, error: Exception) -> Response:
        api_error = _as_api_error(error)
        if api_error.status >= 500 and not isinstance(error, ApiError):
            report(error)
        return error_response(api_error, error_body(request.url.path, api_error))

    return app


def _schema(app: FastAPI, made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The document with the errors that there are, in place of FastAPI's 422."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    schema = made()
    schemas = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
    reference = {"schema": {"$ref": "#/components/schemas/Error"}}
    told = {"description": "What was found, what is expected", "content": {"application/json": reference}}
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            operation["responses"] |= {"4XX": told, "5XX": told}
    return schema


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, RequestValidationError):
        return validation_error(error.errors(), error.body)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"found {error.detail}, expected a route and method of /docs")
    return as_api_error(error)


def _state_router(switch: Switch, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["state"])

    @router.get("/health", summary="Alive; 503 while a model that failed is not loaded again")
    async def health() -> Response:
        if switch.seat.failure is not None:
            return JsonResponse({"status": "failed", "reason": switch.seat.failure}, status_code=503)
        return JsonResponse({"status": "ok"})

    @router.get("/ready", summary="200 where a model is loaded and all ranks answer")
    async def ready() -> Response:
        reason = await switch.seat.why_not_ready()
        loaded = switch.seat.loaded
        if reason is not None or loaded is None:
            return JsonResponse({"status": "not ready", "reason": reason}, status_code=503)
        return JsonResponse({"status": "ready", "model": loaded.entry.model_id})

    @router.get("/metrics", summary="Prometheus' text form", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        file = files("tpllama.server").joinpath(_PAGE)
        if not file.is_file():
            raise ApiError(404, "found no page here, expected a route of /docs")
        return HTMLResponse(file.read_text(encoding="utf-8"))

    return router
