"""Engines: HTTP, event and replay sockets, block sizes, models, and the result of the probe (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from streams.doctor.findings import Finding, Group, listed
from streams.doctor.observations import EngineSeen, Observations

_FROM_HERE = "If it is only out of reach from this machine, run the doctor where the bridge runs"


def check_engines(seen: Observations) -> Iterator[Finding]:
    """Every engine answers, publishes its events, has a replay socket, and serves its model in the scope's blocks."""
    logs = None if seen.kafka is None else seen.kafka.logs
    for engine in seen.engines:
        worker, subject = engine.worker, f"worker {engine.worker.worker_id}"
        if engine.error is not None:
            yield Finding(
                Group.ENGINES,
                "engine_unreachable",
                subject,
                f"the engine at {worker.url} does not answer: {engine.error}",
                f"Start it, or correct its URL in the --engine option. {_FROM_HERE}",
            )
        yield from _sockets(engine, subject)
        if engine.models is not None and worker.model not in engine.models:
            yield Finding(
                Group.ENGINES,
                "other_model",
                subject,
                f"it is registered with the model {worker.model}, but serves {', '.join(engine.models[:8])}",
                "Correct model= in its --engine option, or leave it out: the bridge then asks the engine",
            )
        served = None if logs is None else logs.models.get(worker.model)
        scope = worker.block_size if served is None else served.block_size
        # A size that divides the scope's is that of pages, or of one device's share of a block.
        if engine.block_size is not None and scope % engine.block_size:
            yield Finding(
                Group.ENGINES,
                "engine_block_size",
                subject,
                f"it reports blocks of {engine.block_size} tokens, but {worker.model} has {scope} in this scope",
                f"Restart the engine with --block-size {scope}, or set block_size in every process of the scope",
            )


def _sockets(engine: EngineSeen, subject: str) -> Iterator[Finding]:
    broken = [socket for socket in engine.events if socket.error is not None]
    for socket in broken:
        yield Finding(
            Group.ENGINES,
            "events_unreachable",
            subject,
            f"its events cannot be received from {socket.address}: {socket.error}",
            "Start the engine with KV events enabled and an endpoint such as tcp://*:5557 (docs/engines.md), and check "
            f"events= in its --engine option. {_FROM_HERE}",
        )
    if engine.events and not broken and engine.tokens_grew and not any(socket.n_messages for socket in engine.events):
        yield Finding(
            Group.ENGINES,
            "no_events",
            subject,
            "it processes requests, but a subscription to its events got nothing",
            "Enable prefix caching and KV events in the engine (docs/engines.md)",
        )
    if engine.events and not engine.replays:
        yield Finding(
            Group.ENGINES,
            "no_replay",
            subject,
            "it is registered without a replay socket: a lost batch makes its answers degraded, and an idle engine "
            "stays `no_events_yet`",
            "Start the engine with a replay_endpoint, and add replay= to its --engine option",
        )
    for socket in engine.replays:
        if socket.error is not None:
            yield Finding(
                Group.ENGINES,
                "replay_unreachable",
                subject,
                f"its replay socket does not answer: {socket.error}",
                "Check replay_endpoint of the engine and replay= of its --engine option; the ports of events and "
                f"replay may be swapped. {_FROM_HERE}",
            )


def check_tokenizers(seen: Observations) -> Iterator[Finding]:
    """With --tokenizer, each engine makes the same tokens of the same prompts as the files."""
    served = sorted({engine.worker.model for engine in seen.engines})
    for model in seen.tokenizer_models:
        if served and model not in served:
            yield Finding(
                Group.TOKENIZERS,
                "model_not_served",
                f"model {model}",
                "--tokenizer names it, but no registered engine serves it, so nothing was compared",
                f"Name it as the registry does: {listed(served)}",
            )
    for engine in seen.engines:
        if engine.tokens is None:
            continue
        subject = f"worker {engine.worker.worker_id}"
        differ = [f"{name} ({difference})" for name, difference in engine.tokens.items() if difference]
        if differ:
            yield Finding(
                Group.TOKENIZERS,
                "tokens_differ",
                subject,
                f"it makes other tokens than the files of {engine.worker.model} of these prompts: {'; '.join(differ)}",
                "If only chats differ, the chat template is another one (--chat-template of the engine, or an older "
                "download of the model); otherwise it is the tokenizer. Use the engine's own files",
            )
        elif not engine.tokens:
            yield Finding(
                Group.TOKENIZERS,
                "no_tokenize",
                subject,
                "it has no /tokenize, so its tokenizer cannot be compared",
                "Leave out --tokenizer for its model, or use --probe, which compares the hashes of token ids",
            )


def check_probe(seen: Observations) -> Iterator[Finding]:
    """The blocks of a probe prompt have the hashes that a router computes, at the engine and in every router."""
    for engine in seen.engines:
        probe, subject = engine.probe, f"worker {engine.worker.worker_id}"
        if probe is None:
            continue
        if probe.error is not None:
            yield Finding(
                Group.PROBE,
                "probe_refused",
                subject,
                f"the probe prompt was not computed: {probe.error}",
                "The engine must serve /v1/completions with token ids; --engine-key-file names a key that it requires",
            )
            continue
        if probe.n_stored is not None and not probe.n_events:
            yield Finding(
                Group.PROBE,
                "no_events",
                subject,
                "it computed the probe prompt, but published no event",
                "Enable prefix caching and KV events in the engine (docs/engines.md)",
            )
        elif probe.n_stored is not None and probe.n_stored < probe.n_blocks:
            yield Finding(
                Group.PROBE,
                "hash_disagreement",
                subject,
                f"of the {probe.n_blocks} blocks of the probe prompt, its events have {probe.n_stored} with the hashes "
                "that a router computes",
                "The tokens or the blocks differ: the engine adds tokens to the prompt, its --block-size is another "
                "one, or it serves an adapter or a cache salt that the request does not name",
            )
            continue
        for url, matched in probe.matched.items():
            if isinstance(matched, str):
                yield Finding(
                    Group.PROBE,
                    "probe_unmatched",
                    f"router {url}",
                    f"it cannot be asked for the probe prompt: {matched}",
                    "POST /matches needs a token with the right `route`",
                )
            elif matched < probe.n_blocks:
                yield Finding(
                    Group.PROBE,
                    "hash_disagreement",
                    f"router {url}",
                    f"of the {probe.n_blocks} blocks of the probe prompt that worker {engine.worker.worker_id} "
                    f"computed, it finds {matched}",
                    "The events do not reach it, or it computes other hashes: compare block_size, Kafka, topic_prefix "
                    "and the version of kvstreams in router, worker and bridge",
                )
