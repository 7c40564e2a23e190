"""The gRPC server of the picker, called by the official client of gRPC."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from grpc_health.v1 import health_pb2

from streams.errors import SettingsError
from streams.picker.grpc.call import first_of
from streams.picker.grpc.health import CHECK, WATCH, Health, ServingStatus, requested_name, status_message
from streams.picker.grpc.limits import MIB, Limits, Reason
from streams.process.listener import Listener
from streams.security.access import HTTP_2, CertificateAccess
from streams.settings import AccessSettings
from tests.helpers import grpc_server
from tests.helpers.authority import Authority
from tests.helpers.grpc_server import EACH, EAGER, ECHO, FAIL, HOLD, LAST, NOTHING, Running, until

running = partial(grpc_server.running, clients_stay=True)

_FAST = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100)]
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """Give the loop that a test runs on: the product's is uvloop."""
    loop: Callable[[], asyncio.AbstractEventLoop] = request.param
    return loop


@asynccontextmanager
async def _channel(server: Running) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.target, _UNLIMITED) as channel:
        yield channel


async def _status(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details()


async def test_a_unary_call_is_answered(new_loop: object) -> None:
    """One message and the end of the client give one message and OK."""
    async with running() as server, _channel(server) as channel:
        assert await channel.unary_unary(LAST)(b"hello") == b"hello"
        assert server.echo.streams[0].is_half_closed


async def test_messages_go_both_ways_while_the_call_is_open(new_loop: object) -> None:
    """Each message of a stream is answered before the next one is sent."""
    async with running() as server, _channel(server) as channel:
        call = channel.stream_stream(EACH)()
        for number in range(50):
            await call.write(b"%d" % number)
            assert await call.read() == b"%d" % number
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 65_536, MIB, 6 * MIB])
async def test_messages_of_all_sizes_arrive_whole(size: int) -> None:
    """Messages that are empty, that fill a frame, and that exceed the windows of flow control, arrive both ways."""
    message = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    async with running() as server, _channel(server) as channel:
        assert await channel.unary_unary(LAST)(message) == message
        call = channel.stream_stream(EACH)()
        for _ in range(3):
            await call.write(message)
        await call.done_writing()
        assert [answer async for answer in call] == [message] * 3


async def test_many_streams_share_a_connection(new_loop: object) -> None:
    """Hundreds of calls at a time get their own answers."""
    async with running() as server, _channel(server) as channel:
        each = channel.unary_unary(LAST)
        numbers = [b"%d" % number for number in range(300)]
        assert await asyncio.gather(*(each(number) for number in numbers)) == numbers
        assert server.server.held().connections == 1


async def test_more_streams_than_announced_wait_in_the_client() -> None:
    """The limit of streams is announced, so a client waits with further calls, and none fails."""
    async with running(Limits(streams_max=4)) as server, _channel(server) as channel:
        held = [channel.stream_stream(HOLD)() for _ in range(10)]
        for call in held:
            asyncio.ensure_future(call.write(b"x")).add_done_callback(lambda done: done.exception())
        await until(lambda: len(server.echo.streams) >= 4)
        finished: list[object] = []
        while len(finished) < 10:
            await until(lambda: len(server.echo.streams) > len(finished))
            assert server.server.held().calls <= 4
            stream = server.echo.streams[len(finished)]
            # gRPC gives its caller INTERNAL if a call ends while it writes.
            await until(lambda: bool(stream.messages))  # noqa: B023
            stream.call.finish()
            finished.append(stream)
        assert [await call.code() for call in held] == [grpc.StatusCode.OK] * 10
        assert server.server.tally.refused_calls == 0


async def test_a_call_may_end_before_its_client_has_sent_all(new_loop: object) -> None:
    """A service that has answered ends the call with OK, although the client could send more."""
    async with running() as server, _channel(server) as channel:
        for _ in range(20):
            call = channel.stream_stream(EAGER)()
            await call.write(b"pick")
            assert await call.read() == b"pick"
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
        assert server.server.held().connections == 1


async def test_a_status_has_a_text(new_loop: object) -> None:
    """A text with other characters than ASCII arrives as it was."""
    async with running() as server, _channel(server) as channel:
        call = channel.unary_unary(NOTHING)(b"x")
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert await _status(call) == (grpc.StatusCode.ABORTED, "100 % für nichts\n")


@pytest.mark.parametrize(
    ("method", "status"),
    [(ECHO + "Other", grpc.StatusCode.UNIMPLEMENTED), (FAIL, grpc.StatusCode.INTERNAL)],
)
async def test_what_cannot_be_served_is_answered(method: str, status: grpc.StatusCode) -> None:
    """An unknown method is UNIMPLEMENTED. An exception of a service ends its call only."""
    async with running() as server, _channel(server) as channel:
        call = channel.unary_unary(method)(b"x")
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert await call.code() is status
        assert await channel.unary_unary(LAST)(b"y") == b"y"


async def test_compressed_messages_are_refused() -> None:
    """A compressed message ends its call with UNIMPLEMENTED, and others are served."""
    async with running() as server:
        async with grpc.aio.insecure_channel(server.target, compression=grpc.Compression.Gzip) as channel:
            call = channel.unary_unary(LAST)(b"x" * 10_000)
            with pytest.raises(grpc.aio.AioRpcError):
                await call
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        async with _channel(server) as channel:
            assert await channel.unary_unary(LAST)(b"y") == b"y"


async def test_a_message_over_the_limit_is_refused() -> None:
    """A message of exactly the limit is accepted; one byte more ends the call with RESOURCE_EXHAUSTED."""
    async with running(Limits(message_bytes_max=10_000)) as server, _channel(server) as channel:
        each = channel.unary_unary(LAST)
        assert await each(b"x" * 10_000) == b"x" * 10_000
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await each(b"x" * 10_001)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_deadline_of_a_client_ends_the_call(new_loop: object) -> None:
    """The service learns that a call is over when the client's deadline has passed."""
    async with running() as server, _channel(server) as channel:
        call = channel.unary_unary(HOLD)(b"x", timeout=0.1)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(server.echo.all_ended)
        assert len(server.echo.streams) == 1


async def test_a_client_that_cancels_ends_the_call(new_loop: object) -> None:
    """The service learns at once that the client has cancelled."""
    async with running() as server, _channel(server) as channel:
        call = channel.stream_stream(HOLD)()
        await call.write(b"x")
        await until(lambda: server.echo.streams and server.echo.streams[0].messages)
        call.cancel()
        await until(server.echo.all_ended)
        assert server.server.tally.reset_calls == 1
        server.echo.streams[0].call.send(b"too late")
        server.echo.streams[0].call.finish()


async def test_a_lost_connection_ends_its_calls(new_loop: object) -> None:
    """Calls end when their client is gone."""
    async with running() as server:
        async with _channel(server) as channel:
            calls = [channel.stream_stream(HOLD)() for _ in range(5)]
            for call in calls:
                await call.write(b"x")
            await until(lambda: len(server.echo.streams) == 5)
        await until(server.echo.all_ended)


async def test_messages_wait_for_a_client_that_does_not_read(new_loop: object) -> None:
    """What exceeds the client's window is queued, in order, and the end comes after it."""
    async with running() as server, _channel(server) as channel:
        call = channel.stream_stream(HOLD)()
        await call.write(b"x")
        await until(lambda: server.echo.streams)
        ours = server.echo.streams[0].call
        for number in range(40):
            ours.send(bytes([number]) * 500_000)
        ours.finish()
        ours.finish()  # a second end changes nothing
        assert server.server.held().buffered_bytes > 0
        assert server.echo.all_ended()  # the service has nothing more to do with it
        answers = [answer async for answer in call]
        assert [(answer[0], len(answer)) for answer in answers] == [(number, 500_000) for number in range(40)]
        assert await call.code() is grpc.StatusCode.OK


async def test_a_queue_has_a_limit() -> None:
    """A call whose client does not read ends with RESOURCE_EXHAUSTED when its queue exceeds the budget."""
    async with running(Limits(buffered_bytes_max=2 * MIB)) as server, _channel(server) as channel:
        call = channel.stream_stream(HOLD)()
        await call.write(b"x")
        await until(lambda: server.echo.streams)
        ours = server.echo.streams[0].call
        while ours.is_open:
            assert server.server.held().buffered_bytes <= 2 * MIB
            ours.send(b"x" * 300_000)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_draining_fails_no_open_call(new_loop: object) -> None:
    """Calls that are open end as they would have, new calls are refused, and the connections close."""
    async with running() as server, _channel(server) as channel:
        calls = [channel.stream_stream(HOLD)() for _ in range(10)]
        for call in calls:
            await call.write(b"x")
        await until(lambda: len(server.echo.streams) == 10)
        draining = asyncio.create_task(server.server.drain(20))
        await until(lambda: all(each.leaving for each in server.server._owner.connections))
        for stream in server.echo.streams:
            await asyncio.sleep(0.01)
            stream.call.send(b"late")
            stream.call.finish()
        for call in calls:
            assert [answer async for answer in call] == [b"late"]
            assert await call.code() is grpc.StatusCode.OK
        assert await draining == 0
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary(LAST)(b"x", timeout=5)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_draining_under_load_fails_no_call() -> None:
    """While clients go on, one of two servers drains: each call is answered by one of them."""
    async with running() as one, running() as other:
        service_config = (
            '{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.01s", '
            '"maxBackoff": "0.1s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}], '
            '"loadBalancingConfig": [{"round_robin": {}}]}'
        )
        target = f"ipv4:{one.target},{other.target}"
        async with grpc.aio.insecure_channel(target, [("grpc.service_config", service_config)]) as channel:
            each, n_done, is_over = channel.unary_unary(LAST), [0], [False]

            async def client() -> None:
                while not is_over[0]:
                    assert await each(b"x", timeout=20) == b"x"
                    n_done[0] += 1

            clients = [asyncio.create_task(client()) for _ in range(20)]
            await until(lambda: len(one.echo.streams) > 100)
            assert await one.server.drain(20) == 0
            n_then = n_done[0]
            await until(lambda: n_done[0] > n_then + 500)
            is_over[0] = True
            await asyncio.gather(*clients)


async def test_calls_that_do_not_end_are_cut_after_the_time_to_drain(new_loop: object) -> None:
    """Draining ends after its time, says how many calls it cut, and their services learn of it."""
    async with running() as server, _channel(server) as channel:
        call = channel.stream_stream(HOLD)()
        await call.write(b"x")
        await until(lambda: server.echo.streams)
        assert await server.server.drain(0.05) == 1
        assert server.echo.all_ended()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


# -- TLS ---------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _tls_channel(server: Running, **credentials: bytes) -> AsyncIterator[Any]:
    async with grpc.aio.secure_channel(
        f"localhost:{server.port}", grpc.ssl_channel_credentials(**credentials), _FAST
    ) as channel:
        yield channel


async def test_calls_go_over_tls(tmp_path: Path, new_loop: object) -> None:
    """A client that trusts the authority is answered, with big messages too."""
    authority = Authority(tmp_path, "fleet")
    settings = AccessSettings(tls_certificate=authority.sign("server", "localhost"))
    trusted = Path(authority.file).read_bytes()
    async with running(settings=settings) as server, _tls_channel(server, root_certificates=trusted) as channel:
        for size in (1, 2 * MIB):
            assert await channel.unary_unary(LAST)(b"x" * size) == b"x" * size


async def test_a_client_certificate_is_required_where_it_is_set(tmp_path: Path) -> None:
    """With an authority of clients, only a client with one of its certificates is answered."""
    authority, strangers = Authority(tmp_path, "fleet"), Authority(tmp_path, "strangers")
    certificate = authority.sign("server", "localhost")
    settings = AccessSettings(tls_certificate=certificate, tls_client_ca=authority.file)
    trusted = Path(authority.file).read_bytes()
    async with running(settings=settings) as server:
        for signer, is_served in ((authority, True), (strangers, False), (None, False)):
            own = {}
            if signer is not None:
                pem = Path(signer.sign("gateway", "gateway")).read_bytes()
                own = {"private_key": pem, "certificate_chain": pem}
            async with _tls_channel(server, root_certificates=trusted, **own) as channel:
                call = channel.unary_unary(LAST)(b"x", timeout=10)
                if is_served:
                    assert await call == b"x"
                else:
                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        await call
                    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_self_signed_certificate_encrypts(tmp_path: Path) -> None:
    """Without a certificate of its own, a server may make one, for clients that take any."""
    async with running(self_signed=True) as server:
        pem = await asyncio.to_thread(ssl.get_server_certificate, ("localhost", server.port))
        async with _tls_channel(server, root_certificates=pem.encode()) as channel:
            assert await channel.unary_unary(LAST)(b"x") == b"x"


async def test_draining_over_tls_fails_no_open_call(tmp_path: Path, new_loop: object) -> None:
    """TLS has no half-closed connections; open calls get their answers nevertheless, and the connection closes."""
    authority = Authority(tmp_path, "fleet")
    settings = AccessSettings(tls_certificate=authority.sign("server", "localhost"))
    trusted = Path(authority.file).read_bytes()
    async with running(settings=settings) as server, _tls_channel(server, root_certificates=trusted) as channel:
        call = channel.stream_stream(EACH)()
        await call.write(b"x")
        assert await call.read() == b"x"
        draining = asyncio.create_task(server.server.drain(20))
        await asyncio.sleep(0)
        await call.write(b"y" * MIB)
        assert await call.read() == b"y" * MIB
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        assert await draining == 0
        assert server.server.held().connections == 0


async def test_clients_must_speak_http_2_over_tls(tmp_path: Path, new_loop: object) -> None:
    """A TLS client that offers no HTTP/2 is not served."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with running(self_signed=True) as server:
        for protocols in ([], ["http/1.1"]):
            if protocols:
                context.set_alpn_protocols(protocols)
            reader, writer = await asyncio.open_connection("localhost", server.port, ssl=context)
            assert not await reader.read()
            writer.close()
        assert server.server.tally.connections_ended == {Reason.NO_ALPN: 2}


async def test_a_new_certificate_is_used_for_new_connections(tmp_path: Path) -> None:
    """When the file of the certificate changes, new connections get the new one, and open calls go on."""
    before, after = Authority(tmp_path, "before"), Authority(tmp_path, "after")
    certificate = tmp_path / "used.pem"
    certificate.write_bytes(Path(before.sign("one", "localhost")).read_bytes())
    trusted, trusted_then = (Path(each.file).read_bytes() for each in (before, after))
    async with (
        running(settings=AccessSettings(tls_certificate=str(certificate))) as server,
        _tls_channel(server, root_certificates=trusted) as channel,
    ):
        call = channel.stream_stream(EACH)()
        await call.write(b"before")
        assert await call.read() == b"before"
        certificate.write_bytes(Path(after.sign("two", "localhost")).read_bytes())
        async with _tls_channel(server, root_certificates=trusted_then) as other:
            assert await other.unary_unary(LAST)(b"x", wait_for_ready=True, timeout=20) == b"x"
        await call.write(b"after")
        assert await call.read() == b"after"
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


def test_an_address_that_others_reach_needs_client_certificates(tmp_path: Path) -> None:
    """Without client certificates, other addresses than loopback are refused at start, unless that is accepted."""
    authority = Authority(tmp_path, "fleet")
    certificate = authority.sign("server", "localhost")
    with pytest.raises(SettingsError, match="tls_client_ca"):
        Listener("0.0.0.0", 0, "port", CertificateAccess(AccessSettings(tls_certificate=certificate), HTTP_2))
    for settings in (
        AccessSettings(tls_certificate=certificate, tls_client_ca=authority.file),
        AccessSettings(allow_anonymous=True),
    ):
        Listener("0.0.0.0", 0, "port", CertificateAccess(settings, HTTP_2)).close()


# -- health ------------------------------------------------------------------------------------------------------------


class _Statuses(dict[str, ServingStatus]):
    """What names answer; a test changes it."""


async def test_health_is_answered_by_name(new_loop: object) -> None:
    """Check answers the status of a name, next to another service, and NOT_FOUND for a name that does not exist."""
    statuses = _Statuses({"": ServingStatus.SERVING, "readiness": ServingStatus.NOT_SERVING})
    health = Health(statuses.get)
    async with running(service=first_of([lambda _: None, health])) as server, _channel(server) as channel:
        check = channel.unary_unary(
            CHECK, health_pb2.HealthCheckRequest.SerializeToString, health_pb2.HealthCheckResponse.FromString
        )
        for name, status in statuses.items():
            answer = await check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == status
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await check(health_pb2.HealthCheckRequest(service="other"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary(CHECK)(b"\x0a\xff")
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def _watch(channel: grpc.aio.Channel) -> Any:
    """Begin to watch the readiness."""
    watch = channel.unary_stream(
        WATCH, health_pb2.HealthCheckRequest.SerializeToString, health_pb2.HealthCheckResponse.FromString
    )
    return watch(health_pb2.HealthCheckRequest(service="readiness"))


async def test_a_watch_reports_changes(new_loop: object) -> None:
    """Watch reports the status at once, each change, and a name that does not exist yet."""
    statuses = _Statuses()
    health = Health(statuses.get)
    async with running(service=health) as server, _channel(server) as channel:
        call = _watch(channel)
        assert (await call.read()).status == ServingStatus.SERVICE_UNKNOWN
        statuses["readiness"] = ServingStatus.SERVING
        assert (await call.read()).status == ServingStatus.SERVING  # found by the timer
        statuses["readiness"] = ServingStatus.NOT_SERVING
        health.changed()
        assert (await call.read()).status == ServingStatus.NOT_SERVING
        call.cancel()
        await until(lambda: not health._watches)


async def test_a_server_that_stops_ends_the_watches(new_loop: object) -> None:
    """Each one gets the last status first, also one that begins afterwards."""
    statuses = _Statuses({"readiness": ServingStatus.SERVING})
    health = Health(statuses.get)
    async with running(service=health) as server, _channel(server) as channel:
        call = _watch(channel)
        assert (await call.read()).status == ServingStatus.SERVING
        statuses["readiness"] = ServingStatus.NOT_SERVING
        health.leave()
        for each in (call, _watch(channel)):
            assert (await each.read()).status == ServingStatus.NOT_SERVING
            assert await each.read() is grpc.aio.EOF
            assert await each.code() is grpc.StatusCode.OK
        assert not health._watches


@pytest.mark.parametrize("status", ServingStatus)
def test_health_messages_are_those_of_protobuf(status: ServingStatus) -> None:
    """Both messages are read and written as protobuf does."""
    answer = health_pb2.HealthCheckResponse.FromString(status_message(status))
    assert answer.status == status
    for name in ("", "readiness", "ü" * 200):
        assert requested_name(health_pb2.HealthCheckRequest(service=name).SerializeToString()) == name


def test_unknown_fields_of_a_health_request_are_skipped() -> None:
    """A later version of the message may have more fields, of every kind."""
    name = b"\x0a\x02ab"
    for more in (b"\x10\x96\x01", b"\x11" + bytes(8), b"\x1a\x03xyz", b"\x1d" + bytes(4)):
        assert requested_name(more + name + more) == "ab"
    for broken in (b"\x0a", b"\x0a\x05ab", b"\x13", b"\xff" * 11, b"\x0a\x02\xff\xfe"):
        with pytest.raises(ValueError, match=r"\w"):
            requested_name(broken)
