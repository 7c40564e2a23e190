"""Diagrams and tables of the documentation that are drawn from the code's state machines and from the order of effects.

What lives here: one function for each diagram or table, which returns Markdown. What must not: which page has which
(tools/reference.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from streams.core.cxl_memory import CxlMemoryState
from streams.cxl.states import AFTER_OWNER_ENDED, NOT_POOLED
from streams.cxl.states import RULES as CXL_RULES
from streams.engines.feed_table import OF_CONNECTION, RULES, Action, FeedPhase, Signal
from streams.tables import partition


def effects() -> list[str]:
    """The effects of one batch in their order, as the header of tables/partition.py numbers them."""
    listed = re.findall(r"^\d\. (.+)$", partition.__doc__ or "", re.MULTILINE)
    return [re.sub(r"\s{2,}.*", "", each) for each in listed]


def effects_diagram() -> str:
    """The effects of one batch, and what happens if one of them fails."""
    names = effects()
    lines = ["flowchart TD"]
    lines += [f'    e{number}["{number}. {name}"]' for number, name in enumerate(names, 1)]
    lines += ['    again["drop memory and producer, fence older producers, read the changelog to its end"]']
    lines += [f"    e{number} --> e{number + 1}" for number in range(1, len(names))]
    lines += [f"    e{number} -. failure .-> again" for number in (4, 5, 6)]
    return _mermaid([*lines, "    again -. the same batch .-> e1"])


def _mermaid(lines: list[str]) -> str:
    return "\n".join(["```mermaid", *lines, "```"])


def feed_diagram() -> str:
    """The changes of a feed's phase. Phases in which a batch or a replay is in question are one state."""
    names = [phase.name for phase in FeedPhase if _state(phase) == _IN_QUESTION]
    return _mermaid(
        [
            "stateDiagram-v2",
            f'    state "{"<br/>".join(names)}" as {_IN_QUESTION}',
            f"    [*] --> {FeedPhase.STARTING.name}",
            *_feed_edges(),
        ]
    )


def feed_phases() -> str:
    """What has to be found out in each phase."""
    return "\n".join(
        ["| phase | what has to be found out |", "|---|---|"]
        + [f"| `{phase.name}` | {phase.value} |" for phase in FeedPhase]
    )


def feed_table() -> str:
    """What a feed does at each signal."""
    lines = ["| when | in the phase | next phase | what the feed does |", "|---|---|---|---|"]
    for signal in Signal:
        for actions, target, phases in _outcomes(signal):
            names = ", ".join(f"`{phase.name}`" for phase in phases)
            done = "; ".join(action.value for action in actions)
            next_phase = "the same" if target is None else f"`{target.name}`"
            lines.append(f"| `{signal.name.lower()}`: {signal.value} | {names} | {next_phase} | {done or 'nothing'} |")
    return "\n".join(lines)


def _outcomes(signal: Signal) -> Iterator[tuple[tuple[Action, ...], FeedPhase | None, list[FeedPhase]]]:
    """Yield what is done at a signal, the phase that follows (None: the same one), and the phases that have both."""
    rules = {phase: rules[signal] for phase, rules in RULES.items() if signal in rules}
    entered = {(rule.actions, rule.target) for phase, rule in rules.items() if rule.target is not phase}
    outcomes: dict[tuple[tuple[Action, ...], FeedPhase | None], list[FeedPhase]] = {}
    for phase, rule in rules.items():
        stays = rule.target is phase and (rule.actions, phase) not in entered
        outcomes.setdefault((rule.actions, None if stays else rule.target), []).append(phase)
    for (actions, target), phases in outcomes.items():
        yield actions, target, phases


#: The state that stands for all phases in which a batch or a replay is in question.
_IN_QUESTION = "batch_or_replay"


def _state(phase: FeedPhase) -> str:
    return phase.name if phase in OF_CONNECTION | {FeedPhase.FEEDING} else _IN_QUESTION


def _feed_edges() -> Iterator[str]:
    signals: dict[tuple[str, str], list[str]] = {}
    for phase, rules in RULES.items():
        for signal in Signal:
            if signal in rules and _state(rules[signal].target) != _state(phase):
                named = signals.setdefault((_state(phase), _state(rules[signal].target)), [])
                named += [signal.name.lower()] * (signal.name.lower() not in named)
    for (source, target), named in signals.items():
        yield f"    {source} --> {target}: {',<br/>'.join(named)}"


def cxl_diagram() -> str:
    """The states of a block in CXL memory."""
    return _mermaid(["stateDiagram-v2", f"    [*] --> {NOT_POOLED.state}", *_cxl_edges()])


def _cxl_edges() -> Iterator[str]:
    for source in CxlMemoryState:
        for target in CxlMemoryState:
            rule = CXL_RULES[target]
            if source in rule.sources:
                needs = ", needs a pool" if rule.needs_pool else ""
                yield f"    {source} --> {target}: {rule.placement.value} the placement{needs}"
        if source in AFTER_OWNER_ENDED:
            yield f"    {source} --> {AFTER_OWNER_ENDED[source]}: its owner's incarnation ends"
