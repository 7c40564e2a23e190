"""The metrics of a front.

What lives here: their declarations, and what they are read from. What must not: counting, which the front does itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from streams.client.migration import Failure
from streams.core.workers import RenderOutcome
from streams.frontend.disaggregation import Split
from streams.frontend.render_audit import MODELS_MAX, RenderAudit, Rendering
from streams.process.metrics import Distribution, Label, Metric, counter, gauge, histogram
from streams.prompts.tokenizing import SOURCES

#: How a request ended. `completed`: the engine's answer reached the client to its end, whatever its status. `refused`:
#: the front or the router refused it. `failed`: no engine could answer. `withheld`: it had broken two engines.
#: `broken`: the engine failed after its first token. `client_gone`: the client disconnected. `client_slow`: it did not
#: read in time.
COMPLETED, REFUSED, FAILED, WITHHELD, BROKEN, CLIENT_GONE, CLIENT_SLOW = OUTCOMES = (
    "completed",
    "refused",
    "failed",
    "withheld",
    "broken",
    "client_gone",
    "client_slow",
)

#: How an engine fails after a stream's first token.
FAILURES = tuple(failure.value for failure in Failure)

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class MovedStreams:
    """What a front counts of streams that have ended and had migrated. lost_seconds: by stream."""

    streams: int = 0
    tokens_recovered: int = 0
    tokens_prefilled_again: int = 0
    lost_seconds: Distribution = field(default_factory=lambda: Distribution(*_SECONDS))


@dataclass(slots=True)
class FrontCounts:
    """What a front counts. sources, characters: those of its Tokenizing. render_probes: of its ParityProbes."""

    sources: Counter[str]
    characters: Counter[str]
    render_probes: Counter[RenderOutcome]
    outcomes: Counter[str] = field(default_factory=Counter)
    splits: Counter[Split] = field(default_factory=Counter)
    pulls: int = 0
    retries: int = 0
    engine_failures: Counter[str] = field(default_factory=Counter)
    migrations: int = 0
    moved: MovedStreams = field(default_factory=MovedStreams)
    output_tokens: int = 0
    prompt_tokens: int = 0
    active: int = 0
    reports_lost: int = 0
    failures_reported: int = 0
    renders: RenderAudit = field(default_factory=RenderAudit)
    tokenize_seconds: Distribution = field(default_factory=lambda: Distribution(*_SECONDS))
    route_seconds: Distribution = field(default_factory=lambda: Distribution(*_SECONDS))
    first_token_seconds: Distribution = field(default_factory=lambda: Distribution(*_SECONDS))


FRONT_METRICS: tuple[Metric[FrontCounts], ...] = (
    counter(
        "kvstreams_front_requests_total",
        "Requests of clients that have ended, by how: `completed` ones got an engine's answer to its end, whatever its "
        "status; `refused` ones were refused by the front or a router; `failed` ones found no engine that answered; "
        "`withheld` ones had broken two engines, and went no further; in `broken` ones the engine failed after its "
        "first token; `client_gone` and `client_slow` ones were cancelled, since the client disconnected or did not "
        "read.",
        lambda counts: {outcome: counts.outcomes[outcome] for outcome in OUTCOMES},
        Label("outcome", OUTCOMES),
    ),
    gauge("kvstreams_front_active_requests", "Requests that the front is serving.", lambda counts: counts.active),
    counter(
        "kvstreams_front_retries_total",
        "Requests that were sent to another engine, since one had failed before its first token.",
        lambda counts: counts.retries,
    ),
    counter(
        "kvstreams_front_split_requests_total",
        "Requests of models with prefill workers, by what became of their prompts: `remote` ones were computed on a "
        "prefill worker; the others on the decode worker, because it lacked too few tokens (`short`), the request "
        "cannot be split (`unsuitable`), no prefill worker was idle enough (`busy`), one failed (`failed`), "
        "no CXL pool has a prefill worker as a member although KV caches go through pools (`no_pool`), or the KV cache "
        "did not become available to the decode worker (`not_transferred`).",
        lambda counts: {split.value: counts.splits[split] for split in Split},
        Label("outcome", tuple(split.value for split in Split)),
    ),
    counter(
        "kvstreams_front_pulls_total",
        "Requests that were sent to an engine with another one from which it may pull blocks of the prompt "
        "(`front_kv_pull_tokens_min`).",
        lambda counts: counts.pulls,
    ),
    counter(
        "kvstreams_front_engine_failures_total",
        "Failures of engines after a stream's first token, with `front_migration`: the connection broke (`died`), "
        "nothing came for `front_stall_timeout_s` (`stalled`), or the engine reported an error or refused to resume "
        "(`refused`).",
        lambda counts: {failure: counts.engine_failures[failure] for failure in FAILURES},
        Label("how", FAILURES),
    ),
    counter(
        "kvstreams_front_migrations_total",
        "Migrations of a stream to another engine after its first token.",
        lambda counts: counts.migrations,
    ),
    counter(
        "kvstreams_front_moved_streams_total",
        "Streams that have ended and had migrated at least once.",
        lambda counts: counts.moved.streams,
    ),
    counter(
        "kvstreams_front_recovered_tokens_total",
        "Tokens of prompts and answers so far that engines found in CXL pools when a stream migrated to them.",
        lambda counts: counts.moved.tokens_recovered,
    ),
    counter(
        "kvstreams_front_prefilled_again_tokens_total",
        "Tokens of prompts and answers so far that were computed again when a stream migrated.",
        lambda counts: counts.moved.tokens_prefilled_again,
    ),
    counter(
        "kvstreams_front_prompts_total",
        "Requests by the source of their tokens: `ids` from the client, `files` from the model's tokenizer, `engine` "
        "from an engine's `/tokenize`; with `none` they are routed by load.",
        lambda counts: {source: counts.sources[source] for source in SOURCES},
        Label("source", SOURCES),
    ),
    counter("kvstreams_front_prompt_tokens_total", "Tokens of all prompts.", lambda counts: counts.prompt_tokens),
    counter(
        "kvstreams_front_output_tokens_total",
        "Tokens of all answers, by the engines' usage. In streams without it, events are counted, and an engine may "
        "send several tokens in one.",
        lambda counts: counts.output_tokens,
    ),
    counter(
        "kvstreams_front_tokenizer_characters_total",
        "Characters of prompts by what the tokenizer did: those of a `cached` piece were not encoded again.",
        lambda counts: {how: counts.characters[how] for how in ("cached", "encoded")},
        Label("how", ("cached", "encoded")),
    ),
    counter(
        "kvstreams_front_reports_lost_total",
        "Reports on bookings that no router accepted; these bookings end by their TTL.",
        lambda counts: counts.reports_lost,
    ),
    counter(
        "kvstreams_front_failed_engines_total",
        "Failures of engines that were reported to a router, so that all routers avoid the engine for a while; at most "
        "one per engine and second.",
        lambda counts: counts.failures_reported,
    ),
    counter(
        "kvstreams_front_render_probes_total",
        "Probes of whether an engine makes the same tokens as this front, by their outcomes.",
        lambda counts: {outcome.value: counts.render_probes[outcome] for outcome in RenderOutcome},
        Label("outcome", tuple(outcome.value for outcome in RenderOutcome)),
    ),
    counter(
        "kvstreams_front_prompts_audited_total",
        "Prompts that the front or an engine's `/tokenize` rendered, by what the engine that answered reports of them: "
        "the same tokens (`equal`), as many without saying which (`same_length`), another number (`other_length`), or "
        "as many others (`other_tokens`). Token ids are only known of streams with `front_migration`",
        lambda counts: {rendering.value: counts.renders.renderings[rendering] for rendering in Rendering},
        Label("outcome", tuple(rendering.value for rendering in Rendering)),
    ),
    counter(
        "kvstreams_front_prompts_rendered_otherwise_total",
        "Those of them that differ, by model and version of the engine, which is empty if the engine does not say.",
        lambda counts: dict(counts.renders.different),
        Label("model", values_max=MODELS_MAX),
        Label("engine_version", values_max=MODELS_MAX),
    ),
    histogram(
        "kvstreams_front_tokenize_seconds", "Time to tokenize a prompt.", read=lambda counts: counts.tokenize_seconds
    ),
    histogram(
        "kvstreams_front_route_seconds",
        "Time to route a request, in the router's queue as well.",
        read=lambda counts: counts.route_seconds,
    ),
    histogram(
        "kvstreams_front_first_token_seconds",
        "Time from a request's arrival to its first token, of streams.",
        read=lambda counts: counts.first_token_seconds,
    ),
    histogram(
        "kvstreams_front_migration_lost_seconds",
        "Time that a stream lost by migrating: from the last byte of an engine to the next one's first token.",
        read=lambda counts: counts.moved.lost_seconds,
    ),
)
