"""Computing a request's prompt on a prefill worker, before or while its decode worker takes the request.

What lives here: the order of the calls, the prefill's booking, and falling back. What must not: the conditions and the
bodies (disaggregation), and sending the request to its decode worker (proxy). Nothing here raises for what a worker or
a router did: then the decode worker computes the prompt.
"""

from __future__ import annotations

import asyncio
import logging
import random
from array import array
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, cast

from streams.client.booking import Booking
from streams.client.failed_engines import Failing
from streams.client.http import KvRouterClient
from streams.client.payloads import RouteOptions
from streams.client.plain_http import ConnectFailed, PlainHttp
from streams.client.reports import BookingKey, OutstandingReport
from streams.errors import AllWorkersBusy, KvStreamsError, NoEligibleWorker
from streams.frontend.answers import may_be_served_elsewhere
from streams.frontend.disaggregation import (
    BOOTSTRAP_ROOMS,
    PARAMS_FIELD,
    ModelRoles,
    Split,
    SplitLimits,
    bootstrap_fields,
    fields_to_split,
    is_busy,
    pauses_s,
    prefill_body,
    ranks_that_reach,
    stays,
    transfer_for,
    transferred_fields,
    usable_blocks,
)
from streams.frontend.fleet import Fleet
from streams.frontend.metrics import FrontCounts
from streams.frontend.migrating import ENGINE_FAILURES
from streams.frontend.pulling import source_to_pull
from streams.frontend.usage import usage_of_page
from streams.settings import FrontSettings, KvTransfer

log = logging.getLogger(__name__)

#: Bytes of a prefill's answer, which has one token and what a transfer needs.
ANSWER_BYTES_MAX = 8 << 20

_PREFILL, _DECODE = "prefill", "decode"

#: Fields of the route request that the prefill's own request does not have: it neither waits in a queue nor generates.
_NOT_OF_A_PREFILL = ("phase", "queue", "queue_timeout_ms", "expected_output_tokens", "explain", "sequences")

_T = TypeVar("_T")


class PrefillFailed(Exception):
    """The prefill failed while the decode worker waits for it. The request can be sent there again as it came."""


class RemotePrefill:
    """A prefill elsewhere, as the proxy needs to know it.

    more: fields that the decode request gets in addition. worker: "id/rank" of the prefill worker, for clients who ask.
    """

    def __init__(
        self, more: Mapping[str, Any], worker: str, prefill: Callable[[], Coroutine[Any, Any, bool]] | None = None
    ) -> None:
        """prefill: computes the prompt, if that has to happen while the decode worker has the request; returns whether
        it succeeded. None if the prompt is computed already."""
        self.more = more
        self.worker = worker
        self._prefill = prefill

    async def alongside(self, attempt: Coroutine[Any, Any, _T], has_begun: Callable[[], bool]) -> _T:
        """Send the decode request while the prefill runs. Raises PrefillFailed, and what the attempt raises.

        has_begun: whether the client has got anything; from then on a failed prefill does not matter.
        """
        if self._prefill is None:
            return await attempt
        sending = asyncio.ensure_future(attempt)
        prefill = asyncio.ensure_future(self._prefill())
        try:
            await asyncio.wait({sending, prefill}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done() and not prefill.result() and not has_begun():
                raise PrefillFailed
            return await sending
        finally:
            for task in (sending, prefill):
                task.cancel()
            await asyncio.gather(sending, prefill, return_exceptions=True)


class Prefilling:
    """Prefills of one front. Used on one loop."""

    def __init__(
        self,
        settings: FrontSettings,
        router: KvRouterClient,
        fleet: Fleet,
        counts: FrontCounts,
        http: PlainHttp,
    ) -> None:
        """http: for calls of engines."""
        self._settings = settings
        self._router = router
        self._fleet = fleet
        self._counts = counts
        self._http = http
        self._warned = False
        self._limits = SplitLimits(settings.front_remote_prefill_tokens_min, settings.front_prefill_backlog_tokens_max)

    def splits(self, model: str | None) -> bool:
        """Whether the requests of a model are bound to decode workers, because it has prefill workers."""
        roles = self._fleet.roles(model) if self._settings.front_disaggregation else None
        return roles is not None and roles.splits

    async def begin(
        self,
        booking: Booking,
        path: str,
        body: bytes,
        tokens: bytes | None,
        options: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> RemotePrefill | None:
        """Compute a prompt on a prefill worker, if that is worthwhile; None if the decode worker is to compute it.

        booking: of the decode worker, which may be reassigned to one that reaches the blocks. tokens: of the prompt,
        None if they are not known. options: of the route request. headers: for engines.
        """
        split, remote = await self._begun(booking, path, body, tokens, options, headers)
        if split is not None:
            self._counts.splits[split] += 1
        if remote is None:
            await booking.prefill_again()
        return remote

    async def _begun(
        self,
        booking: Booking,
        path: str,
        body: bytes,
        tokens: bytes | None,
        options: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> tuple[Split | None, RemotePrefill | None]:
        """Return what became of the request, None if that is not known yet, and the prefill if it is elsewhere."""
        roles = self._fleet.roles(options.get("model"))
        if roles is None or not tokens:
            return Split.UNSUITABLE, None
        n_tokens = len(tokens) // 4
        if stays(booking.answer, n_tokens, roles.block_size, self._limits):
            return Split.SHORT, None
        fields = fields_to_split(body)
        if fields is None:
            return Split.UNSUITABLE, None
        transfer = transfer_for(self._settings.front_kv_transfer, self._fleet.router_mode)
        if transfer is KvTransfer.POOL and not self._fleet.share_pool(roles.prefill_ids):
            self._warn_without_pool(options.get("model"))
            return Split.NO_POOL, None
        prefill = await self._book(booking, tokens, options, roles)
        if isinstance(prefill, Split):
            return prefill, None
        if prefill.url is None or is_busy(prefill.answer, roles.block_size, self._limits):
            prefill.end()
            return Split.BUSY, None
        booking.prefill_complete()  # the decode worker computes nothing of the prompt, or only its end
        worker = f"{prefill.worker_id}/{prefill.dp_rank}"
        bootstrap = None
        if transfer is KvTransfer.BOOTSTRAP:
            port = self._settings.front_bootstrap_port
            bootstrap = bootstrap_fields(prefill.url, port, random.randrange(BOOTSTRAP_ROOMS))
        source: Mapping[str, Any] | None = None
        if transfer is not KvTransfer.BOOTSTRAP:  # SGLang's, whose engines do not pull
            source = source_to_pull(prefill.answer, roles.block_size, self._settings.front_kv_pull_tokens_min)
        self._counts.pulls += source is not None
        sent = prefill_body(fields, transfer, bootstrap, None if source is None else source[PARAMS_FIELD])
        if bootstrap is not None:
            return None, RemotePrefill(bootstrap, worker, lambda: self._succeeds(prefill, path, sent, headers))
        answer = await self._compute(prefill, path, sent, headers, pulls=source is not None)
        if answer is None:
            return Split.FAILED, None
        if transfer is KvTransfer.POOL:
            n_blocks = usable_blocks(n_tokens, roles.block_size)
            if not await self._await_pooled(booking, tokens, options, n_blocks):
                return Split.NOT_TRANSFERRED, None
            return Split.REMOTE, RemotePrefill({}, worker)
        more = transferred_fields(answer)
        return (Split.NOT_TRANSFERRED, None) if more is None else (Split.REMOTE, RemotePrefill(more, worker))

    def _warn_without_pool(self, model: str | None) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "front_kv_transfer is pool, but no CXL pool has a prefill worker of model %s as a member, so decode "
                "workers compute all prompts. Register the pool with its members (PUT /pools/{id}), or set "
                "front_kv_transfer; this is logged once",
                model,
            )

    async def _book(
        self, booking: Booking, tokens: bytes, options: Mapping[str, Any], roles: ModelRoles
    ) -> Booking | Split:
        """Book a prefill worker under the same request id. It is tried once: a busy fleet is not waited for.

        Workers of both roles are left out, since a long prompt would delay the answers that they generate.
        """
        kept = {name: value for name, value in options.items() if name not in _NOT_OF_A_PREFILL}
        request = {
            **kept,
            "request_id": booking.request_id,
            "phase": _PREFILL,
            "packed": tokens,
            "allowed_worker_ids": roles.prefill_ids,
            "explain": True,
            "kv_sources": self._settings.front_kv_pull_tokens_min > 0,
            # Nothing is decoded there, so blocks in use say nothing about how busy a worker is.
            "router_config_override": {"track_active_blocks": False},
        }
        try:
            return Booking(self._router, request, await self._router.reroute(request), booking.failures)
        except BaseException as exc:
            # The router may have booked, and its answer was lost.
            self._router.report(BookingKey(booking.request_id, _PREFILL), OutstandingReport(free=True))
            if isinstance(exc, AllWorkersBusy | NoEligibleWorker):
                return Split.BUSY
            if isinstance(exc, KvStreamsError):
                log.debug("no prefill worker could be booked: %s", exc)
                return Split.FAILED
            raise

    async def _compute(
        self, prefill: Booking, path: str, body: bytes, headers: Mapping[str, str], *, pulls: bool = False
    ) -> bytes | None:
        """Let a prefill worker compute a prompt; returns its answer, None if it failed. The booking ends with it.

        pulls: its engine may pull blocks from another one.
        """
        assert prefill.url is not None
        headers = {**headers, "Accept": "application/json", **prefill.rank_headers}
        timeout_s = self._settings.front_silence_timeout_s
        try:
            response = await self._http.request("POST", prefill.url, path, headers, body, timeout_s, is_short=True)
            try:
                answer = await response.read(ANSWER_BYTES_MAX)
            finally:
                response.close()
        except ENGINE_FAILURES as exc:
            log.debug("the prefill of worker %d failed: %r", prefill.worker_id, exc)
            prefill.note_failure(Failing.UNREACHABLE if isinstance(exc, ConnectFailed) else Failing.BROKE)
            return None
        else:
            prefill.note_usage(usage_of_page(answer), is_cached_here=not pulls)
        finally:
            prefill.end()
        if may_be_served_elsewhere(response.status):
            prefill.note_failure(Failing.REFUSED)
        elif response.status == 200:
            self._router.failed_engines.answered(prefill.worker_id)
        return answer if response.status == 200 and len(answer) <= ANSWER_BYTES_MAX else None

    async def _succeeds(self, prefill: Booking, path: str, body: bytes, headers: Mapping[str, str]) -> bool:
        """Let a prefill worker compute a prompt; returns whether it did."""
        succeeded = await self._compute(prefill, path, body, headers) is not None
        self._counts.splits[Split.REMOTE if succeeded else Split.FAILED] += 1
        return succeeded

    async def _await_pooled(self, booking: Booking, tokens: bytes, options: Mapping[str, Any], n_blocks: int) -> bool:
        """Wait until the decode worker reaches the blocks in a pool; otherwise the booking goes to one that does."""
        asked = {name: options[name] for name in ("model", "lora_name", "cache_salt") if name in options}
        fields = cast(RouteOptions, {**asked, "phase": _DECODE})
        timeout_s = self._settings.front_transfer_timeout_s
        token_ids = array("I", tokens)
        try:
            async with asyncio.timeout(timeout_s):
                for pause_s in pauses_s(timeout_s):
                    overlap = (await self._router.find_matches_for_request(token_ids, **fields)).by_rank
                    reaching = ranks_that_reach(overlap.scores, overlap.cxl_accessible_scores, n_blocks)
                    if (booking.worker_id, booking.dp_rank) in reaching:
                        return True
                    if reaching and await booking.reassign_to(sorted({rank.worker_id for rank in reaching})):
                        booking.prefill_complete()
                        return True
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            pass
        except KvStreamsError as exc:
            log.debug("it is not known whether a prompt is pooled: %s", exc)
        return False
