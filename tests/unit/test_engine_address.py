"""Addresses of engines: what `--engine` accepts, what it refuses, and the addresses of further ranks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from streams.core.ids import WorkerId
from streams.engines.address import (
    EngineAddress,
    check_distinct,
    engine_address,
    engine_template,
    first_clash,
    needs_lookup,
    port_above,
)
from streams.engines.dialects.registry import DEFAULT_DIALECT, DIALECTS
from streams.errors import KvStreamsError, SettingsError

ADDRESS = "id=1,url=http://x:8000/,events=tcp://x:1"
LOCAL = "id=3,url=http://z:8000,events=tcp://127.0.0.1:5557,dp=2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id=1,url=http://x,events=http://x/kv_cache_events,replay=tcp://x:1", "have no replay socket"),
        ("id=1,events=tcp://x:1", "url missing"),
        ("url=http://x,events=tcp://x:1", "id missing"),
        ("id=one,url=http://x,events=tcp://x:1", "whole numbers"),
        ("id=-1,url=http://x,events=tcp://x:1", "0 to 2^64-1"),
        ("id=1,url=http://x,events=tcp://x:1,dp=0", "dp 1 to"),
        ("id=1,url=http://x,events=tcp://x:1,colour=red", "colour unknown"),
        ("id=1,url=http://x,events=tcp://x:1,events=tcp://x:2", "events given more than once"),
        ("id=1,url=http://x,events=tcp://x:1,id=2", "id given more than once"),
        ("id=1,url=x:8000,events=tcp://x:1", "url is 'x:8000'. It must look like http://HOST:PORT"),
        ("id=1,url=x,events=tcp://x:1", "It must look like http://"),
        ("id=1,url=tcp://x:8000,events=tcp://x:1", "It must look like http://"),
        ("id=1,url=http://,events=tcp://x:1", "It must look like http://"),
        ("id=1,url=http://x:port,events=tcp://x:1", "It must look like http://"),
        ("id=1,url=http://x:99999,events=tcp://x:1", "It must look like http://"),
        ("id=1,url=http://x,events=x:5557", "events is 'x:5557'. It must look like tcp://HOST:PORT"),
        ("id=1,url=http://x,events=tcp://x", "It must look like tcp://"),
        ("id=1,url=http://x,events=tcp://x:1,replay=http://x:1", "replay is 'http://x:1'"),
        ("id=1,url=http://x,events=tcp://x:1,metrics=x/metrics", "metrics is 'x/metrics'"),
    ],
)
def test_an_unusable_engine_address_is_refused_and_the_wrong_part_named(text: str, message: str) -> None:
    """The error names each part that is missing, unknown or malformed, and shows the expected form of a URL."""
    with pytest.raises(SettingsError, match=re.escape(message)):
        engine_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "id=1,url=http://x,events=http://x/kv_cache_events,dp=2",
        "id=1,url=https://x,events=tcp://10.0.0.1:5557,replay=tcp://[::1]:5558",
        "id=1,url=http://[::1]:8000/,events=ipc:///tmp/events,metrics=https://x/metrics",
    ],
)
def test_an_engine_address_may_use_every_form_that_a_client_can_connect_to(text: str) -> None:
    """Hosts may be names or numbers, and URLs whose scheme has a default port may leave the port out."""
    assert engine_address(text).worker_id == 1


def test_an_engines_metrics_are_at_slash_metrics_of_its_url_by_default() -> None:
    """`metrics=` gives another URL, which trtllm-serve needs."""
    assert engine_address(ADDRESS).metrics_url == "http://x:8000/metrics"
    elsewhere = engine_address(f"{ADDRESS},metrics=http://x:8000/prometheus/metrics?a=b")
    assert elsewhere.metrics_url == "http://x:8000/prometheus/metrics?a=b"


def test_rank_n_listens_n_ports_above_rank_0() -> None:
    """The ports of an engine's ranks are consecutive, as in vLLM."""
    assert port_above("tcp://host:5557", 0) == "tcp://host:5557"
    assert port_above("tcp://host:5557", 3) == "tcp://host:5560"
    assert port_above("tcp://[fd00::7]:5557", 1) == "tcp://[fd00::7]:5558"
    with pytest.raises(KvStreamsError, match="no port"):
        port_above("tcp://host", 1)


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        (("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558"), False),
        (("tcp://[fd00::7]:5557", None), False),
        (("ipc:///tmp/events", None), False),
        (("http://gpu1:8000/kv_cache_events", None), False),
        ((None, None), False),
        (("tcp://gpu1:5557", None), True),
        (("tcp://10.0.0.7:5557", "tcp://gpu1:5558"), True),
        (("tcp://localhost:5557", None), True),
    ],
)
def test_only_addresses_of_sockets_with_a_name_are_looked_up(
    endpoints: tuple[str | None, str | None], expected: bool
) -> None:
    """A lookup may take seconds, during which the sockets of other engines in the same ZMQ context would wait."""
    assert needs_lookup(EngineAddress(WorkerId(1), "http://gpu1:8000", *endpoints)) is expected


def test_an_address_selects_a_dialect_by_name() -> None:
    """Every registered dialect can be selected; without `dialect=` it is recognised from the bytes."""
    for name, dialect in DIALECTS.items():
        assert engine_address(f"{ADDRESS},dialect={name}").dialect is dialect
        assert dialect.name == name
    assert engine_address(ADDRESS).dialect is engine_address(f"{ADDRESS},dialect=").dialect is DEFAULT_DIALECT
    assert DEFAULT_DIALECT.name == "auto"


def test_an_unknown_dialect_is_refused_with_the_list_of_known_ones() -> None:
    """A typo in a dialect's name must not select the default one."""
    with pytest.raises(SettingsError, match="dialect 'vlm' is unknown") as caught:
        engine_address(f"{ADDRESS},dialect=vlm")
    assert caught.value.remedy == f"The known ones are: {', '.join(sorted(DIALECTS))}"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("id=1,url=http://y,events=tcp://y:1", "id=1"),
        ("id=2,url=http://y,events=tcp://x:1", "events=tcp://x:1"),
        ("id=2,url=http://y,events=tcp://localhost:5557", "events=tcp://localhost:5557"),
        ("id=2,url=http://y,events=tcp://[::1]:5558", "events=tcp://[::1]:5558"),
        (
            "id=2,url=http://y,events=tcp://127.0.0.1:5556,dp=2",
            "events=tcp://127.0.0.1:5557 (rank 0 at tcp://127.0.0.1:5556)",
        ),
    ],
)
def test_two_engines_with_one_id_or_one_address_of_events_are_refused(second: str, message: str) -> None:
    """One of them would be given the events of the other, and answers for it would be exact and wrong."""
    with pytest.raises(SettingsError, match=re.escape(f"two engines have {message}")):
        check_distinct([engine_address(ADDRESS), engine_address(LOCAL), engine_address(second)])
    check_distinct([engine_address(ADDRESS), engine_address("id=2,url=http://x:8001,events=tcp://x:2")])
    check_distinct([engine_address(LOCAL), engine_address("id=2,url=http://x:8001,events=tcp://127.0.0.1:5559,dp=2")])


@pytest.mark.parametrize("endpoint", ["gpu1:5557", "tcp://gpu1", "tcp://gpu1:port", "tcp://gpu1:65536", "tcp://[::1"])
def test_an_unusable_address_of_events_in_the_registry_clashes_only_with_itself(endpoint: str) -> None:
    """`PUT /workers/{id}` takes any text. One such record must not end a bridge, whose other engines are usable."""
    unusable = EngineAddress(WorkerId(1), "http://x", endpoint, dp_size=2)
    other = engine_address("id=2,url=http://y,events=tcp://y:1")
    assert first_clash([unusable, other]) is None
    again = replace(unusable, worker_id=WorkerId(3))
    assert first_clash([unusable, other, again]) == (again, f"events={endpoint} (rank 0 at {endpoint})")


def test_an_engines_adapters_are_separated_by_plus() -> None:
    """Without `lora=`, the adapters are not listed; an empty value lists none."""
    assert engine_address(ADDRESS).lora_names is None
    assert engine_address(f"{ADDRESS},lora=sql+org/chat").lora_names == ("sql", "org/chat")
    assert engine_address(f"{ADDRESS},lora=").lora_names == ()
    with pytest.raises(SettingsError, match=r"It must look like lora=NAME\+NAME"):
        engine_address(f"{ADDRESS},lora=sql+")


def test_a_template_names_the_server_of_lmcache_in_the_pod_of_each_engine() -> None:
    """Such a server has the address of its pod as its id."""
    template = engine_template("url=http://{host}:8000,events=tcp://{host}:5557,lmcache={host}")
    assert template.at("10.0.0.7").lmcache == "10.0.0.7"
    assert template.at("fd00::7").lmcache == "fd00::7"


def test_the_template_of_a_pool_has_the_port_of_each_engine() -> None:
    """Events and replays are one port higher for each further engine of a host; a page that is polled is not."""
    template = engine_template(
        "url=http://{host}:{port},events=bind:tcp://{host}:5557,replay=tcp://{host}:6", ports=True
    )
    engine = template.at("fd00::1", 8101, 1)
    assert (engine.url, engine.events, engine.replay) == (
        "http://[fd00::1]:8101",
        "bind:tcp://[fd00::1]:5558",
        "tcp://[fd00::1]:7",
    )
    polled = engine_template("url=http://{host}:{port},events=http://{host}:{port}/kv_cache_events", ports=True)
    assert polled.at("a", 8101, 1).events == "http://a:8101/kv_cache_events"
    with pytest.raises(SettingsError, match=re.escape("url does not contain {port}")):
        engine_template("url=http://{host}:8000", ports=True)
