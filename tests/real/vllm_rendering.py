"""Renders chats with vLLM's own code, without an engine. It runs in vLLM's environment, as a script.

What lives here: the calls of vLLM. What must not: imports of this project, which is not installed there.

Its input is a list of folders of models and bodies, as JSON. A body may be of a chat, of /v1/responses, which has
`input`, or of /v1/messages, which has `max_tokens`. Its output is vLLM's version, and for each body its text
and its ids, or an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_LOGGING_LEVEL="ERROR")


async def main() -> None:
    from vllm import __version__

    # Whatever a library prints must not become a part of the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    renderers: dict[str, Any] = {}
    results = [await _rendered(renderers, folder, body) for folder, body in json.load(sys.stdin)]
    json.dump({"version": __version__, "results": results}, answer)
    answer.close()


async def _rendered(renderers: dict[str, Any], folder: str, body: dict[str, Any]) -> dict[str, Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    try:
        if folder not in renderers:
            renderers[folder] = _renderer(folder)
        renderer = renderers[folder]
        if "input" in body:
            from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

            response = await renderer.render_responses(ResponsesRequest.model_validate(body))
            prompt = response.engine_input
            return {"text": prompt.get("prompt"), "ids": list(prompt["prompt_token_ids"])}
        is_message = "max_tokens" in body
        chat = await _of_message(renderer, body) if is_message else ChatCompletionRequest.model_validate(body)
        rendered = await renderer.render_chat(chat)
        if not isinstance(rendered, tuple):
            return {"error": rendered.error.message}
        ((prompt),) = rendered[1]
        return {"text": prompt.get("prompt"), "ids": list(prompt["prompt_token_ids"])}
    except Exception as exc:  # it refuses the request; the caller counts these
        return {"error": str(exc)[:300]}


async def _of_message(renderer: Any, body: dict[str, Any]) -> Any:
    """Return the chat that vLLM's server makes of a message, without what the server needs for generating."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    server = AnthropicServingMessages.__new__(AnthropicServingMessages)
    server.online_renderer, server.model_config = renderer, renderer.model_config
    try:
        merges = server._should_merge_inline_system(renderer)
    except TypeError:  # a server with this template does not start
        merges = True
    return server.to_chat_completion_request(
        AnthropicMessagesRequest.model_validate(body),
        merge_inline_system=merges,
        disabled_thinking_effort=await server._probe_disabled_thinking_effort(),
    )


def _renderer(folder: str) -> Any:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

    model = ModelConfig(model=folder, tokenizer=folder, dtype="float32", max_model_len=65536)
    return OnlineRenderer(
        model,
        renderer_from_config(VllmConfig(model_config=model)),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
    )


if __name__ == "__main__":
    asyncio.run(main())
