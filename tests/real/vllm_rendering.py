"""Renders chats with vLLM's own code, without an engine. It runs in vLLM's environment, as a script.

What lives here: the calls of vLLM. What must not: imports of this project, which is not installed there.

Its input is a list of folders of models and bodies, as JSON. Its output is vLLM's version, and for each body its text
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
        rendered = await renderers[folder].render_chat(ChatCompletionRequest.model_validate(body))
        if not isinstance(rendered, tuple):
            return {"error": rendered.error.message}
        ((prompt),) = rendered[1]
        return {"text": prompt.get("prompt"), "ids": list(prompt["prompt_token_ids"])}
    except Exception as exc:  # it refuses the request; the caller counts these
        return {"error": str(exc)[:300]}


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
    )


if __name__ == "__main__":
    asyncio.run(main())
