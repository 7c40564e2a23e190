"""What a bridge registers of one engine: from its address, its blocks, its ranks, and its list of models.

What lives here: combining them into the registration that the lease writes, whenever one of them changes. What must
not: the rules of the lease (lease), and asking the engine (process_start, scraping).

State: an engine's registration.
"""

from __future__ import annotations

import logging
import time

from streams.core.workers import Worker
from streams.engines.address import EngineAddress
from streams.engines.block_size import EngineBlockSize
from streams.engines.engine_ranks import EngineRanks
from streams.engines.lease import EngineLease
from streams.engines.model_list import ListedFacts

log = logging.getLogger(__name__)


class Registration:
    """The registration of an engine under one model. `renew` lets the lease write what has changed."""

    def __init__(
        self, engine: EngineAddress, model: str, block_size: EngineBlockSize, ranks: EngineRanks, lease: EngineLease
    ) -> None:
        self._engine = engine
        self._model = model
        self._block_size = block_size
        self._ranks = ranks
        self._lease = lease
        self._registered_at_ms = time.time_ns() // 1_000_000
        self._facts: ListedFacts | None = None
        self._ever_listed: set[str] = set()  # adapters
        self._wanted: tuple[Worker, tuple[str, ...]] | None = None

    def on_list(self, facts: ListedFacts) -> None:
        """Take what the engine lists about the model."""
        before = self._facts
        self._facts = facts
        self._ever_listed.update(facts.adapters)
        if self._wanted is not None:
            if before is not None and before != facts:
                log.info("worker %d: %s lists %s now", self._engine.worker_id, self._engine.models_url, _shown(facts))
            self.renew()

    def on_page_block_size(self, size: int | None) -> None:
        """Take the size of the engine's blocks from its metrics page, None if the page has none."""
        self._block_size.on_page(size)
        self.renew()

    def on_stored_block_size(self, size: int | None, *, page_is_read: bool) -> None:
        """Take it from an event; None at the start of an incarnation. page_is_read: see EngineBlockSize."""
        if size is None:
            self._block_size.on_incarnation(page_is_read=page_is_read)
        else:
            self._block_size.on_stored(size)
        self.renew()

    def renew(self) -> None:
        """Let the lease write the registration if it has changed."""
        own, fixed = self._worker(), self._fixed()
        if (own, fixed) == self._wanted:
            return
        had_size = None if self._wanted is None else self._wanted[0].block_size
        if self._block_size.is_wrong and own.block_size != had_size:
            log.warning("%s", self._wrong_block_size())
        self._wanted = own, fixed
        self._lease.want(own, fixed)

    def _worker(self) -> Worker:
        engine, facts = self._engine, self._facts
        set_here = {name: getattr(engine, name) for name in _set_at(engine)}
        return Worker(
            worker_id=engine.worker_id,
            url=engine.url,
            model=self._model,
            block_size=self._block_size.size,
            dp_size=engine.dp_size,
            dp_start=self._ranks.start,
            aliases=() if facts is None else facts.aliases,
            max_model_len=None if facts is None else facts.max_model_len,
            events_endpoint=engine.events,
            replay_endpoint=engine.replay,
            lora_names=self._lora_names(),
            registered_at_ms=self._registered_at_ms,
            **set_here,
        )

    def _lora_names(self) -> tuple[str, ...] | None:
        """The adapters that the engine lists, and those that the operator has set and it has never listed.

        None if there are none of either kind: perhaps the engine loads any adapter on request.
        """
        configured, listed = self._engine.lora_names, () if self._facts is None else self._facts.adapters
        if configured is None and not self._ever_listed:
            return None
        never_listed = [name for name in configured or () if name not in self._ever_listed]
        return tuple(dict.fromkeys((*never_listed, *listed)))

    def _fixed(self) -> tuple[str, ...]:
        """Return the names of the fields whose values replace those of the registry."""
        return (*_set_at(self._engine), *(("aliases", "max_model_len") if self._facts is not None else ()))

    def _wrong_block_size(self) -> str:
        engine, block_size = self._engine, self._block_size
        return (
            f"worker {engine.worker_id}: the engine at {engine.url} has blocks of {block_size.size} tokens, but this "
            f"scope has blocks of {block_size.scope} for {self._model}. The engine gets no requests. Restart it with "
            f"--block-size {block_size.scope}, or set block_size or model_block_sizes in every process of the scope"
        )


def _set_at(engine: EngineAddress) -> tuple[str, ...]:
    """Return the names of the registration's fields that the operator has set at this bridge."""
    return tuple(name for name in ("role", "device_class", "taints", "lmcache") if getattr(engine, name) is not None)


def _shown(facts: ListedFacts) -> str:
    length = "" if facts.max_model_len is None else f", max_model_len {facts.max_model_len}"
    return f"the aliases {list(facts.aliases)} and the adapters {list(facts.adapters)}{length}"
