"""`python -m tests.real.agreement`: what a router promised compared with what a real engine found, a thousand times.

What lives here: the load, and the count. What must not: single cases (test_*.py). Requests are sent one at a time, with
a pause, because engines that answer keep both cores of a small machine busy. A router that reads late rightly says
`approximate` or `degraded`; such answers are shown and do not count. The caches are small, so that blocks are evicted
all the time.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import click

from streams.process.waiting import wait_for
from tests.real.engine import RealEngine
from tests.real.environment import FULL, missing
from tests.real.fleet import Answer, Conversations, running

#: Each engine has 19,200 tokens of cache; the conversations below need about three times as many.
FLAGS = ("--num-gpu-blocks-override", "600")
N_CONVERSATIONS = 48
PROMPT_TOKENS_MAX = 1500

#: Some prompts are completions of token ids, whose ends lie anywhere in a block.
COMPLETIONS = 0.2


#: How long the router may need to judge the last reports.
AUDIT_S = 20.0


@click.command()
@click.option("--requests", "n_requests", default=1000, show_default=True, help="answers that say `exact`")
@click.option("--seed", default=1, show_default=True)
def main(n_requests: int, seed: int) -> None:
    """Compare until so many answers were exact. Exits with 1 if one of them is wrong, or if the router's own audit says
    something else.
    """
    reason = missing()
    if reason is not None:
        raise click.ClickException(reason)
    rng, conversations = random.Random(seed), Conversations(seed)
    active = [conversations.begin() for _ in range(N_CONVERSATIONS)]
    modes: Counter[str] = Counter()
    wrong: list[Answer] = []
    exact_blocks: list[int] = []
    promised = cached = prompt_tokens = 0
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvstreams-real-") as name:
        engines = [RealEngine(number, FULL, Path(name) / "engines", FLAGS) for number in (1, 2)]
        with running(engines, Path(name)) as fleet:
            while modes["exact"] < n_requests:
                if rng.random() < COMPLETIONS:
                    first, length = rng.randrange(3, 40), rng.randrange(1, 600)
                    answer = fleet.complete(FULL, [first + place % 1900 for place in range(length)])
                else:
                    chosen = rng.randrange(N_CONVERSATIONS)
                    answer = fleet.chat(FULL, active[chosen])
                    active[chosen] = conversations.go_on(active[chosen], answer.text)
                    if answer.prompt_tokens > PROMPT_TOKENS_MAX:
                        active[chosen] = conversations.begin()
                modes[answer.mode] += 1
                if answer.mode == "exact":
                    exact_blocks.append(answer.n_blocks)
                    promised += answer.promised_tokens
                    cached += answer.cached_tokens
                    prompt_tokens += answer.prompt_tokens
                    if answer.promised_tokens != answer.cached_tokens:
                        wrong.append(answer)
                        click.echo(f"wrong: {answer}")
                fleet.settle()
            with_blocks = sum(n_blocks > 0 for n_blocks in exact_blocks)
            wait_for(lambda: fleet.audited()["agreed"] >= with_blocks, AUDIT_S, "the audit of the last answers", 0.5)
            audited = fleet.audited()
    click.echo(
        f"{modes.total()} answers in {time.monotonic() - began_s:.0f} s: {dict(modes)}; of {prompt_tokens} prompt "
        f"tokens of exact answers, {promised} were promised and {cached} found; {len(wrong)} answers differ; by the "
        f"audit: {dict(audited)}"
    )
    raise SystemExit(bool(wrong or audited["over"] or audited["not_reported"]))


if __name__ == "__main__":
    main()
