"""Errors in the shapes of OpenAI's and Anthropic's calls (pure).

What lives here: the bodies of answers that report an error. What must not: which error it is, and HTTP.
"""

from __future__ import annotations

from typing import Any

#: Anthropic's types of errors by status.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_page(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape, with the types that vLLM uses."""
    return {"error": {"message": message, "type": _type_of(status), "param": None, "code": code or status}}


def message_error_page(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """Return an error in Anthropic's shape, with its types. The front's code is at the end of the message."""
    type_ = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": type_, "message": f"{message} ({code})" if code else message}}


def _type_of(status: int) -> str:
    named = {
        401: "AuthenticationError",
        403: "PermissionDeniedError",
        404: "NotFoundError",
        408: "RequestTimeoutError",
        409: "ConflictError",
        503: "ServiceUnavailableError",
    }
    return named.get(status, "BadRequestError" if status < 500 else "InternalServerError")
