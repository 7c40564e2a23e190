"""Whether an engine makes the same tokens of the same prompts as a model's files (pure).

What lives here: the prompts, and the comparison. What must not: asking engines (parity_probes, doctor), and tokenizing
(tokenizer). A result names a prompt and positions, and neither text nor token ids.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streams.core.workers import RenderOutcome, RenderPart, RenderReason, RenderResult
from streams.prompts.calls import Kind
from streams.prompts.conversation import Rule

_TEXT = "Héllo, wörld! 3.14 + 2 = 5.14\n\n\tif x:\n    return 'naïve 你好 🙂'  # it's"

_MESSAGES: tuple[Mapping[str, Any], ...] = (
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "content": "5.14"},
    {"role": "user", "content": "And 2 + 2?"},
)

_TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    },
)

_CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 2}'}}

#: What is unusual in a request of a coding agent's client, for each of the rules that versions of engines differ in.
_UNKNOWN_FIELDS = {"cache_control": {"type": "ephemeral"}}


def _after_answer(answer: Mapping[str, Any], *messages: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a chat with this answer in the past."""
    last = messages or (_MESSAGES[-1],)
    return {"messages": [_MESSAGES[1], {"role": "assistant", "content": "5.14", **answer}, *last]}


def _with_result(content: Any) -> Mapping[str, Any]:
    """Return a chat with this result of a tool."""
    result = {"role": "tool", "tool_call_id": _CALL["id"], "content": content}
    return {**_after_answer({"content": "", "tool_calls": [_CALL]}, result), "tools": _TOOLS}


def _parts(*texts: str) -> list[Mapping[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def _user(**fields: Any) -> Mapping[str, Any]:
    return {"messages": [{"role": "user", "content": "And 2 + 2?", **fields}]}


#: The prompts: the call that each is for, and its body without the model. A model without a chat template has only the
#: first one. Some templates refuse a system message or tools, so there is a chat without them. Each kind of turn and of
#: field has a prompt, so that no engine with other rules for one of them makes the same tokens of all.
PROMPTS: Mapping[RenderPart, tuple[Kind, Mapping[str, Any]]] = {
    RenderPart.COMPLETION: (Kind.COMPLETION, {"prompt": _TEXT}),
    **{
        part: (Kind.CHAT, body)
        for part, body in {
            RenderPart.CHAT: {"messages": _MESSAGES[1:]},
            RenderPart.CHAT_WITH_SYSTEM: {"messages": _MESSAGES},
            RenderPart.CHAT_WITH_TOOLS: {"messages": _MESSAGES[1:], "tools": _TOOLS},
            RenderPart.PARTS: _user(content=_parts("And", "", "2 + 2?")),
            RenderPart.PART_FIELDS: _user(content=[{**part, **_UNKNOWN_FIELDS} for part in _parts("And", "2 + 2?")]),
            RenderPart.REASONING: _after_answer({"reasoning": "3.14 and 2"}),
            RenderPart.REASONING_CONTENT: _after_answer({"reasoning_content": "3.14 and 2"}),
            RenderPart.TWO_REASONINGS: _after_answer({"reasoning": "3.14 and 2", "reasoning_content": "2 and 3.14"}),
            RenderPart.TOOL_CALL: {**_after_answer({"content": None, "tool_calls": [_CALL]}), "tools": _TOOLS},
            RenderPart.TOOL_CALL_ARGUMENTS: _after_answer(
                {"tool_calls": [{**_CALL, "function": {"name": "add", "arguments": "[2, 2]"}}]}
            ),
            RenderPart.NO_TOOL_CALLS: _after_answer({"tool_calls": []}),
            RenderPart.TOOL_RESULT: _with_result("4"),
            RenderPart.TOOL_RESULT_PARTS: _with_result(_parts("4", "", "2")),
            RenderPart.EMPTY_TOOL_RESULT: _with_result([]),
            RenderPart.OTHER_ROLE: _after_answer({}, {"role": "critic", "content": "No."}),
            RenderPart.DEVELOPER: {"messages": [{**_MESSAGES[0], "role": "developer"}, *_MESSAGES[1:]]},
            RenderPart.LATE_DEVELOPER: {"messages": [*_MESSAGES, {"role": "developer", "content": "Be exact."}]},
            RenderPart.FIELDS: _user(name="bob", weight=1, reasoning="no", tool_call_id="1", **_UNKNOWN_FIELDS),
            RenderPart.BILLING_LINE: {
                "messages": [
                    {"role": "system", "content": "x-anthropic-billing-header: cc_version=1; cch=2;\nYou are terse."},
                    *_MESSAGES[1:],
                ]
            },
            RenderPart.TOOL_FIELDS: {
                **_user(),
                "tools": [{**_TOOLS[0], "function": {**_TOOLS[0]["function"], "strict": True, **_UNKNOWN_FIELDS}}],
            },
            RenderPart.CONTINUED: {
                "messages": [_MESSAGES[1], {"role": "assistant", "content": " It is "}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
            RenderPart.VARIABLES: {
                **_user(),
                "chat_template_kwargs": {"enable_thinking": False, "thinking": True, "add_generation_prompt": False},
            },
            RenderPart.EFFORT: {**_user(), "reasoning_effort": "none"},
            RenderPart.DOCUMENTS: {**_user(), "documents": [{"title": "Sums", "text": "2 + 2 is 4."}]},
            RenderPart.TOOL_CHOICE: {**_user(), "tools": _TOOLS, "tool_choice": "none"},
        }.items()
    },
}

#: The rule that a prompt shows: of a version of an engine that does not follow it, its tokens are others.
RULES: Mapping[RenderPart, Rule] = {
    RenderPart.PART_FIELDS: Rule.PART_FIELDS,
    RenderPart.REASONING_CONTENT: Rule.REASONING_CONTENT,
    RenderPart.TOOL_CALL_ARGUMENTS: Rule.ARGUMENTS,
    RenderPart.TOOL_RESULT: Rule.TOOL_TEXT,
    RenderPart.TOOL_RESULT_PARTS: Rule.TOOL_TEXT,
    RenderPart.EMPTY_TOOL_RESULT: Rule.TOOL_TEXT,
    RenderPart.DEVELOPER: Rule.DEVELOPER,
    RenderPart.LATE_DEVELOPER: Rule.DEVELOPER,
    RenderPart.BILLING_LINE: Rule.BILLING_LINE,
    RenderPart.TOOL_FIELDS: Rule.TOOL_FIELDS,
    RenderPart.EFFORT: Rule.EFFORT,
}

#: Prompts with fields that `/tokenize` does not read, in whatever version (engine_tokens).
NOT_OF_TOKENIZE = frozenset({RenderPart.EFFORT, RenderPart.DOCUMENTS})


#: Tokens by prompt; None if it is refused.
TokensByPart = Mapping[RenderPart, list[int] | None]


@dataclass(frozen=True, slots=True)
class Difference:
    """Two lists of tokens that differ. position: of the first difference. n_ours, n_theirs: their lengths."""

    position: int
    n_ours: int
    n_theirs: int

    def __str__(self) -> str:
        return f"{self.n_theirs} tokens instead of {self.n_ours}, different from token {self.position} on"


def compare(ours: Sequence[int], theirs: Sequence[int]) -> Difference | None:
    """Return where two lists of tokens differ, None if they are equal."""
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    position = next(
        (position for position, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs))
    )
    return Difference(position, len(ours), len(theirs))


@dataclass(frozen=True, slots=True)
class RenderedPair:
    """The tokens of one prompt. ours, theirs: of the front and of the engine; None if it refuses the prompt."""

    ours: Sequence[int] | None
    theirs: Sequence[int] | None


def judge(rendered: Mapping[RenderPart, RenderedPair]) -> RenderResult:
    """Return the result of a probe from the tokens of its prompts.

    A difference counts more than a prompt that only one side accepts: it makes prompts match nothing, while such a
    prompt is refused by the engine, or routed by load. Prompts that both sides refuse do not count.
    """
    unknown: RenderResult | None = None
    n_compared = 0
    for part, tokens in rendered.items():
        if tokens.ours is not None and tokens.theirs is not None:
            n_compared += 1
            difference = compare(tokens.ours, tokens.theirs)
            if difference is not None:
                return RenderResult(RenderOutcome.DIFFERS, part=part, from_token=difference.position)
        elif tokens.ours is not tokens.theirs and unknown is None:
            reason = RenderReason.ENGINE_REFUSED if tokens.theirs is None else RenderReason.FRONT_REFUSED
            unknown = RenderResult(RenderOutcome.UNKNOWN, reason, part)
    if unknown is not None:
        return unknown
    if not n_compared:
        return RenderResult(RenderOutcome.UNKNOWN, RenderReason.ENGINE_REFUSED)
    return RenderResult(RenderOutcome.EQUAL)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a probe found. result: by the rules of the model. found: by those that fit the engine best.

    ours: the tokens of the front by these. rules: that they are; None if the engine differs by them as well.
    """

    result: RenderResult
    found: RenderResult
    ours: TokensByPart
    rules: Rule | None


async def compare_by_rules(
    theirs: TokensByPart, of_files: Callable[[Rule], Awaitable[TokensByPart]], rules: Rule
) -> Comparison:
    """Compare an engine's tokens with the front's by these rules, and find those that fit it.

    Versions of engines differ in rules, each of which some prompts show. of_files: makes the front's tokens.
    """
    ours = await of_files(rules)
    result = _judged(ours, theirs)
    if result.outcome is not RenderOutcome.DIFFERS:
        return Comparison(result, result, ours, rules)
    for part, rule in RULES.items():
        if theirs.get(part) is not None and ours[part] != theirs[part]:
            tried = await of_files(rules ^ rule)
            if tried[part] == theirs[part]:
                ours, rules = tried, rules ^ rule
    found = _judged(ours, theirs)
    return Comparison(result, found, ours, None if found.outcome is RenderOutcome.DIFFERS else rules)


def _judged(ours: TokensByPart, theirs: TokensByPart) -> RenderResult:
    return judge({part: RenderedPair(ours[part], tokens) for part, tokens in theirs.items()})
