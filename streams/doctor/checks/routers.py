"""Routers: readiness, the registry that they have, agreement among them, and ranks that are degraded (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from streams.core.routing.reasons import EXPLANATIONS
from streams.doctor.findings import Finding, Group, listed
from streams.doctor.observations import Observations, PageSeen, RouterSeen

#: Of reasons that do not make answers degraded.
_MODES = {"audit_disagrees": "approximate"}

#: Contradictions of engines that are a finding: as many, and as great a share of the reports, as of a single rank
#: (core.routing.audit).
_OVER_MIN, _OVER_SHARE_MIN = 5, 0.02


def check_routers(seen: Observations) -> Iterator[Finding]:
    """Every router is ready, in sync, and has the registry of the scope; all have the same blocks."""
    settings = seen.settings
    logs = None if seen.kafka is None else seen.kafka.logs
    for router in seen.routers:
        yield from _one(router)
        if logs is not None and router.workers:
            registered = frozenset(logs.workers)
            missing = frozenset.intersection(*(registered - workers for workers in router.workers))
            added = frozenset.intersection(*(workers - registered for workers in router.workers))
            if missing or added:
                differ = [f"lacks {listed(sorted(missing))}"] * bool(missing)
                differ += [f"has {listed(sorted(added))} in addition"] * bool(added)
                yield Finding(
                    Group.ROUTERS,
                    "other_scope",
                    f"router {router.url}",
                    f"its workers are not those of scope {settings.topic_prefix!r}: it {' and '.join(differ)}",
                    "It reads another Kafka or another topic_prefix: compare `kvstreams config` of both",
                )
    yield from _tokens(seen)
    for one, other in combinations([router for router in seen.routers if router.digests], 2):
        ranks = disagreements(one, other)
        if ranks:
            yield Finding(
                Group.ROUTERS,
                "routers_disagree",
                f"routers {one.url} and {other.url}",
                f"they have different blocks of {len(ranks)} ranks after the same batch, for example of worker "
                f"{ranks[0][0]} rank {ranks[0][1]}",
                "Compare Kafka, topic_prefix and version of both. If they are equal, restart the one whose answers are "
                "wrong, and report the difference as a fault",
            )


def check_states(seen: Observations) -> Iterator[Finding]:
    """With --verify: every router has what the topics have."""
    for state in seen.states:
        subject = f"router {state.url}"
        if state.error is not None:
            yield Finding(
                Group.ROUTERS,
                "state_unverified",
                subject,
                f"it cannot be compared with the topics: {state.error.message}",
                state.error.remedy or "`kvstreams replay --verify URL` with its settings says more",
            )
        elif state.differences:
            yield Finding(
                Group.ROUTERS,
                "state_differs",
                subject,
                f"it has not what the topics have of partition {state.partition}, the registry or the bookings: "
                f"{len(state.differences)} differences, for example {state.differences[0]}",
                "`kvstreams replay --verify URL` lists them with the records concerned. Restart the router, so that it "
                "reads the topics again, and report the difference as a fault",
            )


def _one(router: RouterSeen) -> Iterator[Finding]:
    subject = f"router {router.url}"
    if router.error is not None:
        yield Finding(
            Group.ROUTERS,
            "router_unreachable",
            subject,
            f"it does not answer as a router: {router.error}",
            "Start it, or correct the address",
        )
    if router.refused is not None:
        yield Finding(
            Group.ROUTERS,
            "router_refuses",
            subject,
            f"it answers with {router.refused}: the token is missing, unknown, or lacks the right `read`",
            "--token-file names a file with a token that has it (docs/security.md)",
        )
    if router.not_ready is not None:
        yield Finding(
            Group.ROUTERS,
            "router_not_ready",
            subject,
            f"it is not ready: {router.not_ready}",
            "A router that starts is ready within seconds, or after its kernels are compiled. Otherwise the reason "
            "says what it waits for",
        )
    if router.in_sync and not any(router.in_sync):
        yield Finding(
            Group.ROUTERS,
            "bookings_not_in_sync",
            subject,
            "it does not read the bookings of other routers",
            "Check that it reaches Kafka; its log says since when it does not",
        )
    yield from _ranks(router, subject)
    if router.page is None:
        return
    yield from _audit(router, subject)
    yield from _gateways(router.page, subject)
    for name, labels, number in router.page.samples:
        if name == "kvstreams_unmatched_prompts" and number > 0:
            yield Finding(
                Group.ROUTERS,
                "unmatched_prompts",
                subject,
                f"{number:.0f} prompts of {labels.get('model')} were routed, and none has ever matched a block, "
                "although its engines hold blocks",
                "The prompts are not hashed like the engines' blocks: their token ids (chat template), block size, "
                "lora_name, namespace or cache_salt differ. --probe shows whether an engine agrees",
            )


def _gateways(page: PageSeen, subject: str) -> Iterator[Finding]:
    """Report that gateways ask a picker too early, or in a way that it cannot answer."""
    n_broken = page.total("kvstreams_picker_broken_streams_total")
    if n_broken:
        yield Finding(
            Group.ROUTERS,
            "gateway_breaks_ext_proc",
            subject,
            f"{n_broken:.0f} streams of gateways ended with messages that ext_proc does not allow, so their requests "
            "have no pick",
            "Compare the gateway's ext_proc filter with docs/gateway.md; its log has the picker's reason",
        )
    calls = (sample for sample in page.samples if sample[0] == "kvstreams_picker_calls_total")
    n_early = sum(number for _, labels, number in calls if labels.get("status") == "unavailable")
    if n_early:
        yield Finding(
            Group.ROUTERS,
            "picker_asked_early",
            subject,
            f"gateways asked {n_early:.0f} times while it was not ready; each such request needs a second picker",
            "Let the gateway check the gRPC health of pickers, or Kubernetes their readiness (docs/gateway.md)",
        )


def _tokens(seen: Observations) -> Iterator[Finding]:
    """Report engines of which a front has found that they make other tokens, once for all routers.

    Those that --tokenizer has compared now have findings of their own, if they still differ.
    """
    compared = {int(engine.worker.worker_id) for engine in seen.engines if engine.tokens is not None}
    differing: dict[tuple[str, int], set[int]] = {}
    for router in seen.routers:
        for worker_id, difference in router.differing.items():
            if worker_id not in compared:
                differing.setdefault(difference, set()).add(worker_id)
    for (part, from_token), ids in sorted(differing.items()):
        yield Finding(
            Group.ROUTERS,
            "renders_differ",
            f"worker{'s' * (len(ids) > 1)} {listed(sorted(ids))}",
            f"a front has found other tokens than those of its --tokenizer: of a {part}, from token {from_token} on. "
            "Cached blocks behind that are not found, so prompts are computed again",
            "If it is a chat, give engines and front the same chat template (--chat-template of the engine, or "
            "chat_template.jinja in the folder of --tokenizer); otherwise the tokenizer is another one. --tokenizer "
            "compares all engines",
        )


def _audit(router: RouterSeen, subject: str) -> Iterator[Finding]:
    """Report that engines often find fewer cached blocks than the router promised."""
    assert router.page is not None
    counts = {
        labels.get("outcome"): number
        for name, labels, number in router.page.samples
        if name == "kvstreams_overlap_audited_total"
    }
    n_over, n_reported = counts.get("over", 0.0), sum(counts.values()) - counts.get("not_reported", 0.0)
    if n_over >= max(_OVER_MIN, _OVER_SHARE_MIN * n_reported):
        yield Finding(
            Group.ROUTERS,
            "overlaps_disagree",
            subject,
            f"in {n_over:.0f} of {n_reported:.0f} requests whose engine reported it, the engine found fewer cached "
            "blocks than the router's index had, and no eviction explains it",
            "GET /live or `kvstreams top` shows the ranks that are approximate for it (audit_disagrees). If there are "
            "none, the prompts are rendered otherwise: see kvstreams_front_prompts_audited_total of the fronts",
        )


def _ranks(router: RouterSeen, subject: str) -> Iterator[Finding]:
    lasting = frozenset.intersection(*router.degraded) if router.degraded else frozenset()
    for reason in sorted({reason for reason, _ in lasting}):
        ids = sorted(worker_id for degraded_by, worker_id in lasting if degraded_by == reason)
        yield Finding(
            Group.ROUTERS,
            f"{_MODES.get(reason, 'degraded')}_{reason}",
            subject,
            f"its answers for workers {listed(ids)} are {_MODES.get(reason, 'degraded')}: {reason}",
            EXPLANATIONS[reason].remedy.removesuffix(".")
            if reason in EXPLANATIONS
            else "docs/http.md explains the reason",
        )
    silent = frozenset.intersection(*router.silent) if router.silent else frozenset()
    if silent:
        yield Finding(
            Group.ROUTERS,
            "ranks_silent",
            subject,
            f"ranks of workers {listed(sorted(silent))} were not heard from within their lease, and get no requests",
            "Check these engines and the bridge that feeds them",
        )


def disagreements(one: RouterSeen, other: RouterSeen) -> list[tuple[int, int]]:
    """Ranks of which two routers had different blocks in every round, each time after the same batch."""
    rounds: Sequence[set[tuple[int, int]]] = [
        {
            rank
            for rank in here.keys() & there.keys()
            if here[rank].at == there[rank].at and here[rank].digest != there[rank].digest
        }
        for here, there in zip(one.digests, other.digests, strict=False)
    ]
    return sorted(set.intersection(*rounds)) if rounds else []
