"""Errors for clients: their bodies, and the names of fields that were wrong."""

from __future__ import annotations

from tpllama.config import UserError
from tpllama.server.errors import ApiError, as_api_error, llama_stack_body, openai_body, validation_error


def test_bodies() -> None:
    error = ApiError(404, "found no model x", param="model", code="model_not_found")
    assert openai_body(error) == {
        "error": {
            "message": "found no model x",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    assert llama_stack_body(error)["error"]["detail"] == "found no model x"
    assert ApiError(503, "x").type == "server_error"
    assert ApiError(400, "x", "own").type == "own"


def test_what_a_user_gave_is_a_400_and_the_rest_keeps_its_insides() -> None:
    assert (as_api_error(UserError("found a")).status, as_api_error(UserError("found a")).message) == (400, "found a")
    hidden = as_api_error(KeyError("secret"))
    assert hidden.status == 500
    assert "secret" not in hidden.message


def test_fields_are_named_by_the_way_to_them_in_the_body() -> None:
    body = {"a": [{"kind": "x", "b": "v" * 500}]}
    inner = {"type": "string", "loc": ("body", "a", 0, "x", "b", "str"), "msg": "wrong", "input": "v" * 500}
    outer = {"type": "list", "loc": ("body", "a"), "msg": "no list", "input": []}
    error = validation_error([outer, inner], body)
    assert error.param == "a[0].b"
    assert len(error.message) < 200
    assert validation_error([{"type": "missing", "loc": ("body", "c"), "msg": "", "input": body}], body).param == "c"
    assert validation_error([{"type": "x", "loc": ("body",), "msg": "no JSON", "input": 1}], None).param is None


def test_a_body_that_is_no_json_object_is_said_in_words() -> None:
    told = {"type": "json_invalid", "loc": ("body", 1), "msg": "JSON decode error", "input": {}}
    error = validation_error([told | {"ctx": {"error": "Expecting value"}}], "{bad")
    assert error.message == "found a body that is no JSON (Expecting value, at character 1), expected a JSON object"
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", None)
    told = {"type": "model_attributes_type", "loc": ("body",), "msg": "Input should be", "input": [1]}
    assert validation_error([told], [1]).message == "found a body that is no JSON object, expected a JSON object"
    other = validation_error([told | {"input": b"{}"}], b"{}")
    assert other.message.startswith("found a body that is not of Content-Type application/json, expected ")


def test_a_value_of_another_kind_is_said_in_the_words_of_json() -> None:
    told = {"type": "list_type", "loc": ("body", "a"), "msg": "Input should be a valid list", "input": "x"}
    assert validation_error([told], {"a": "x"}).message == "found a 'x', expected an array"
    told = {"type": "greater_than", "loc": ("body", "a"), "msg": "Input should be greater than 0", "input": 0}
    assert validation_error([told], {"a": 0}).message == "found a '0', expected greater than 0"
