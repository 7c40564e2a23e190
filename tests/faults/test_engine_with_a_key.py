"""What an engine tells only to those who have its key is read with the key, and is not guessed without it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streams.core.events import FeedState
from streams.engines.address import EngineAddress, engine_address, engine_template
from streams.engines.sources.file import engines_of
from streams.engines.sources.named import sources_of
from streams.errors import SettingsError
from streams.settings import Settings
from tests.helpers import bridged_engine
from tests.helpers.bridged_engine import EngineUnderTest
from tests.helpers.engine_double import EngineDouble
from tests.helpers.fed_engine import batches_of, bridging, fed_with_a_batch, is_live, registered, warnings_of

KEY = "sk-of-this-test"

#: Time in which a feed that is live by mistake would show it.
SETTLED_S = 1.5


@pytest.fixture
def double() -> Iterator[EngineDouble]:
    """An engine that requires a key."""
    with EngineDouble() as engine:
        engine.key = KEY
        yield engine


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A file with the engine's key, as an editor writes it."""
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    return file


def address_of(engine: EngineDouble, key_file: Path | None, model: str | None = None) -> EngineAddress:
    file = None if key_file is None else str(key_file)
    return replace(bridged_engine.address_of(engine), model=model, key_file=file)


def lists(engine: EngineDouble, *models: str) -> None:
    engine.models_body = json.dumps({"data": [{"id": model} for model in models]})


def test_an_engine_is_registered_as_the_model_that_it_lists_behind_its_key(
    double: EngineDouble, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def act(engine: EngineUnderTest) -> None:
        await fed_with_a_batch(engine, double, "m")
        assert registered(engine) == ["m"]

    bridging(address_of(double, key_file), act)
    assert KEY not in caplog.text


def test_a_model_that_the_list_behind_the_key_no_longer_has_is_not_live(double: EngineDouble, key_file: Path) -> None:
    async def act(engine: EngineUnderTest) -> None:
        old = await fed_with_a_batch(engine, double, "m")
        await asyncio.sleep(SETTLED_S)
        lists(double, "other")
        await asyncio.to_thread(double.restart)
        await engine.until(lambda: batches_of(engine)[-1].incarnation > old, "another incarnation")
        double.store(1000)
        await asyncio.sleep(SETTLED_S)
        new = [batch for batch in batches_of(engine) if batch.incarnation > old]
        assert FeedState.LIVE not in {batch.feed for batch in new}

    bridging(address_of(double, key_file, "m"), act)


def test_a_key_is_read_again_when_its_file_changes(
    double: EngineDouble, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the file has the key of the new process, nothing says that it serves the model."""

    async def act(engine: EngineUnderTest) -> None:
        old = await fed_with_a_batch(engine, double, "m")
        double.key = "another key"
        await asyncio.to_thread(double.restart)
        await engine.until(lambda: bool(warnings_of(caplog, "it answers 401")), "the refusal to be logged")
        double.store(1000)
        await asyncio.sleep(SETTLED_S)
        assert not is_live(engine, "m", old)
        key_file.write_text("another key")
        await engine.until(lambda: is_live(engine, "m", old), "the feed to be live")

    bridging(address_of(double, key_file), act)
    assert "another key" not in caplog.text


def test_an_engine_whose_key_is_missing_is_named_with_the_remedy(
    double: EngineDouble, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file may be written later, as secrets of Kubernetes are."""
    file = tmp_path / "later"

    async def act(engine: EngineUnderTest) -> None:
        await engine.until(lambda: bool(warnings_of(caplog, "Add key=FILE to its --engine")), "the remedy")
        assert not registered(engine)
        file.write_text(KEY)
        await engine.until(lambda: registered(engine) == ["m"], "the registration")

    bridging(address_of(double, file), act)
    assert len(warnings_of(caplog, f"{file} cannot be read")) == 1


def test_another_host_is_not_sent_the_key(double: EngineDouble, key_file: Path) -> None:
    """The metrics of an engine may be read from elsewhere."""
    with EngineDouble() as elsewhere:

        async def act(engine: EngineUnderTest) -> None:
            await fed_with_a_batch(engine, double, "m")

        bridging(replace(address_of(double, key_file), metrics=f"{elsewhere.url}/metrics"), act)
        assert elsewhere.keys_seen == {("/metrics", None)}
    assert ("/v1/models", f"Bearer {KEY}") in double.keys_seen


def test_every_way_to_name_an_engine_names_its_key(tmp_path: Path) -> None:
    text = "url=http://gpu1:8000,key=/run/secrets/key"
    assert engine_address(f"id=1,{text}").key_file == "/run/secrets/key"
    assert engine_template("url=http://{host}:8000,key=/run/k").at("gpu1").key_file == "/run/k"
    file = tmp_path / "engines.toml"
    file.write_text('[[engine]]\nid = 1\nurl = "http://gpu1:8000"\nkey = "/run/secrets/a,b"\n')
    assert engines_of(str(file))[0].key_file == "/run/secrets/a,b"


@pytest.mark.parametrize("content", [None, "", "two\nlines", "sch\u00fcssel"])
def test_a_key_that_cannot_be_used_is_refused_at_the_start_without_being_shown(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError) as refused:
        sources_of(Settings(), [f"id=1,url=http://gpu1:8000,key={file}"])
    assert str(file) in str(refused.value) and (not content or content not in str(refused.value))
