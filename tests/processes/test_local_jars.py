"""Kafka's jars: downloaded when missing, verified, trusted as the system trusts, and shared by processes."""

from __future__ import annotations

import hashlib
import http.server
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from streams.errors import LocalKafkaError
from streams.lab.kafka import jars
from streams.lab.kafka.jars import Jar, ensure_jars, file_lock, pinned_jars

CONTENTS = {"alpha": b"first " * 500, "beta": b"second", "gamma": b"third"}

#: Where Python and requests look for authorities in addition to the system's.
CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def pin(name: str) -> Jar:
    content = CONTENTS[name]
    return Jar("org.example.jars", name, "1.0", len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a Maven cache that contains all of three pinned jars."""
    pins = tuple(map(pin, CONTENTS))
    monkeypatch.setattr(jars, "pinned_jars", lambda: pins)
    repository = tmp_path / "m2"
    for jar in pins:
        jar.path_in(repository).parent.mkdir(parents=True)
        jar.path_in(repository).write_bytes(CONTENTS[jar.artifact])
    monkeypatch.setenv("M2_REPO", str(repository))
    return repository


@pytest.fixture
def no_jgo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jgo.maven", None)


@pytest.mark.parametrize("file", sorted(jars._PINS.parent.glob("kafka-jars-*.txt")), ids=lambda file: file.stem)
def test_the_pins_are_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file pins the broker of its name and what it needs, each by version, size and digest."""
    monkeypatch.setattr(jars, "_PINS", file)
    pins = pinned_jars.__wrapped__()
    assert {jar.artifact for jar in pins} >= {"kafka_2.13", "kafka-clients", "log4j-slf4j-impl"}
    assert all(jar.size_bytes > 0 and len(jar.sha256) == 64 for jar in pins)
    assert [f"kafka-jars-{jar.version}" for jar in pins if jar.artifact == "kafka_2.13"] == [file.stem]


def test_a_full_cache_needs_neither_jgo_nor_the_network(cache: Path, no_jgo: None) -> None:
    """With every jar in place nothing is downloaded, nothing is written and no progress is reported."""
    reported: list[tuple[int, int, str]] = []
    assert len(ensure_jars(lambda *progress: reported.append(progress))) == len(CONTENTS)
    assert reported == []
    assert not list(cache.glob(".kvstreams*"))


@pytest.mark.parametrize("kept_bytes", [None, 0, 100])
def test_a_missing_or_cut_jar_is_downloaded_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int | None
) -> None:
    """A jar that is missing or too short is replaced by a verified one, and reported as progress."""
    place = pin("alpha").path_in(cache)
    place.unlink()
    if kept_bytes is not None:
        place.write_bytes(CONTENTS["alpha"][:kept_bytes])

    def fetch(jar: Jar, into: Path) -> Path:
        into.mkdir(parents=True)
        (into / "a.jar").write_bytes(CONTENTS["alpha"])
        return into / "a.jar"

    monkeypatch.setattr(jars, "_fetch", fetch)
    reported: list[tuple[int, int, str]] = []
    assert place in ensure_jars(lambda *progress: reported.append(progress))
    assert place.read_bytes() == CONTENTS["alpha"]
    assert reported == [(0, 1, ""), (1, 1, "alpha")]
    assert not list(cache.glob(".kvstreams-staging"))


def test_a_jar_that_stays_wrong_is_named_and_never_put_in_place(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A downloaded file of the right size and other bytes is tried once more; then the error names jar and digests."""
    jar = pin("alpha")
    jar.path_in(cache).unlink()
    fetched: list[Path] = []

    def fetch(jar: Jar, into: Path) -> Path:
        into.mkdir(parents=True)
        (into / "a.jar").write_bytes(bytes(jar.size_bytes))
        fetched.append(into)
        return into / "a.jar"

    monkeypatch.setattr(jars, "_fetch", fetch)
    with pytest.raises(LocalKafkaError, match=rf"{jar.coordinate}.*instead of {jar.sha256}"):
        ensure_jars()
    assert len(fetched) == len(set(fetched)) == 2
    assert not jar.path_in(cache).exists()


def test_a_network_that_fails_is_reported_with_a_remedy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that raises is tried once more; the error names the jar and what to check."""
    jar = pin("alpha")
    jar.path_in(cache).unlink()

    def fetch(jar: Jar, into: Path) -> Path:
        raise ConnectionError("unreachable")

    monkeypatch.setattr(jars, "_fetch", fetch)
    with pytest.raises(LocalKafkaError, match=rf"{jar.coordinate} could not be downloaded.*unreachable") as caught:
        ensure_jars()
    assert "HTTPS_PROXY" in caught.value.remedy
    assert isinstance(caught.value.__cause__, ConnectionError)


@pytest.mark.parametrize("package", ["jgo.maven", "truststore"])
def test_a_missing_package_is_reported_with_a_remedy(
    cache: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """Where a package that downloads is not installed, the error names it and the extra that brings it."""
    monkeypatch.setitem(sys.modules, package, None)
    pin("alpha").path_in(cache).unlink()
    with pytest.raises(LocalKafkaError, match=package.partition(".")[0]) as caught:
        ensure_jars()
    assert "kvstreams[local]" in caught.value.remedy


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the place of the cache gives an error that names the cache."""
    (tmp_path / "m2").touch()
    monkeypatch.setenv("M2_REPO", str(tmp_path / "m2"))
    with pytest.raises(LocalKafkaError, match="cannot be written") as caught:
        ensure_jars()
    assert "M2_REPO" in caught.value.remedy


# -- certificates ----------------------------------------------------------------------------------------------------


class Registry(http.server.BaseHTTPRequestHandler):
    """Serves the jars, and the SHA-1 digests that jgo compares them with."""

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[1]
        content = CONTENTS[name.partition("-")[0]]
        body = hashlib.sha1(content).hexdigest().encode() if name.endswith(".sha1") else content
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def registry(authority: trustme.CA) -> Iterator[str]:
    """A registry whose certificate this authority has signed; gives its URL."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"https://localhost:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def authority(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[trustme.CA]:
    """Give the authority that signed the certificate of jgo's registry. Two jars are missing in the cache."""
    from jgo.maven import _core

    for name in CERTIFICATE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "localhost")
    for name in ("alpha", "gamma"):
        pin(name).path_in(cache).unlink()
    own = trustme.CA()
    with registry(own) as url:
        monkeypatch.setitem(_core.DEFAULT_REMOTE_REPOS, "central", url)
        yield own


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_an_authority_of_the_system_or_of_a_variable_is_trusted(
    cache: Path, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """A server is trusted if its authority is in the trust store, here given by SSL_CERT_FILE, or in requests' own."""
    before = ssl.SSLContext
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    monkeypatch.setenv(variable, str(tmp_path / "authority.pem"))
    assert [path.read_bytes() for path in ensure_jars()] == list(CONTENTS.values())
    assert ssl.SSLContext is before


def test_an_unknown_authority_is_reported_with_both_variables(cache: Path, authority: trustme.CA) -> None:
    """Nothing is downloaded; the error explains whose certificate was refused and where to add its authority."""
    before = ssl.SSLContext
    with pytest.raises(LocalKafkaError, match=r"could not be downloaded.*certificate") as caught:
        ensure_jars()
    assert "SSL_CERT_FILE" in caught.value.remedy
    assert "REQUESTS_CA_BUNDLE" in caught.value.remedy
    assert "trust store" in caught.value.remedy
    assert ssl.SSLContext is before
    assert not pin("alpha").path_in(cache).exists()


# -- the lock --------------------------------------------------------------------------------------------------------


def test_a_lock_is_waited_for_and_then_reported(tmp_path: Path) -> None:
    """A process that does not get the lock in time learns which process may hold it."""
    lock = tmp_path / "lock"
    with (
        file_lock(lock, 0.0, "first"),
        pytest.raises(LocalKafkaError, match="second"),
        file_lock(lock, 0.01, "second"),
    ):
        pytest.fail("two processes hold one lock")
    with file_lock(lock, 0.0, "third"):
        pass
