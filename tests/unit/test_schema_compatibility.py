"""The schemas read the records of the last release, and a process whose schemas cannot does not start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import avro.schema
import pytest
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType

from streams.errors import SchemasIncompatible
from streams.kafka import avro_frames
from streams.kafka.schema_compatibility import check_schemas

RELEASED = sorted((avro_frames.schemas_dir() / "released").glob("*.avsc"))

FEED_WITHOUT_A_VALUE = {"type": "enum", "name": "FeedState", "symbols": ["live", "catching_up"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the schemas, for a test to change."""
    return shutil.copytree(avro_frames.schemas_dir(), tmp_path / "schemas")


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit a schema file."""
    schema = json.loads(path.read_text())
    edit(schema)
    path.write_text(json.dumps(schema))


def field(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a field of a record."""
    found: dict[str, Any] = next(each for each in schema["fields"] if each["name"] == name)
    return found


@pytest.mark.parametrize("released", RELEASED, ids=lambda path: path.stem)
def test_each_schema_reads_what_the_last_release_wrote(released: Path) -> None:
    """A schema of the last release still exists, and the avro package finds that it is read."""
    current = avro_frames.schemas_dir() / released.name
    reader, writer = (avro.schema.parse(path.read_text()) for path in (current, released))
    found = ReaderWriterCompatibilityChecker().get_compatibility(reader, writer)
    assert found.compatibility is SchemaCompatibilityType.compatible, found.messages


def test_a_release_has_all_topics_and_tables() -> None:
    """The folder has schemas of the topics and of the tables, so the test above is not empty."""
    assert {"kv-events", "workers", "router-loads", "prefix-index-run"} <= {path.stem for path in RELEASED}


def test_the_schemas_of_this_version_pass_the_check_at_start() -> None:
    """What a process checks when it starts finds nothing."""
    check_schemas()


@pytest.mark.parametrize(
    "edit",
    [
        lambda schema: schema["fields"].append({"name": "colour", "type": "string", "default": "red"}),
        lambda schema: schema["fields"].remove(field(schema, "model")),
        lambda schema: field(schema, "dp_rank").update(type="long"),
        lambda schema: schema.update(doc="Another text"),
    ],
    ids=["a field with a default", "a field less", "a wider type", "another text"],
)
def test_a_change_that_keeps_old_records_readable_passes(edit: Callable[[dict[str, Any]], None], folder: Path) -> None:
    """Schemas may grow and be described anew."""
    change(folder / "kv-events.avsc", edit)
    check_schemas(folder)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda schema: schema["fields"].append({"name": "colour", "type": "string"}), "default value: colour"),
        (lambda schema: field(schema, "model").update(type="int"), "reader type: int"),
        (lambda schema: field(schema, "feed").update(type=FEED_WITHOUT_A_VALUE, default="live"), "unproven"),
        (lambda schema: schema.update(fields="none"), "cannot be parsed"),
    ],
    ids=["a field without a default", "another type", "a value of an enum less", "no schema"],
)
def test_a_change_that_makes_old_records_unreadable_is_one_line(
    edit: Callable[[dict[str, Any]], None], reason: str, folder: Path
) -> None:
    """The error names the schema and the place, and what to do."""
    change(folder / "kv-events.avsc", edit)
    with pytest.raises(SchemasIncompatible) as raised:
        check_schemas(folder)
    message = str(raised.value)
    assert "cannot read the records of the last release: kv-events" in message
    assert reason in message
    assert "Install kvstreams anew" in message
    assert "\n" not in message


def test_a_schema_that_is_gone_is_an_error(folder: Path) -> None:
    """Its topic still has records of the last release."""
    (folder / "models.avsc").unlink()
    with pytest.raises(SchemasIncompatible, match="models no longer exists"):
        check_schemas(folder)


@pytest.mark.parametrize("earlier", ["released/models.avsc", "previous/models.1.avsc"])
def test_a_record_of_an_earlier_release_is_read_with_a_schema_that_has_grown(
    earlier: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new field has its default in records of the last release, and of those before it."""
    old = avro_frames.RecordCodec("models")
    (folder / "previous").mkdir()
    (folder / "released/models.avsc").rename(folder / earlier)
    change(
        folder / "models.avsc",
        lambda schema: schema["fields"].append({"name": "colour", "type": "string", "default": "red"}),
    )
    monkeypatch.setattr(avro_frames, "schemas_dir", lambda: folder)
    new = avro_frames.RecordCodec("models")
    assert new.fingerprint != old.fingerprint
    datum = {each["name"]: 16 if each["type"] in ("int", "long") else "x" for each in old.source["fields"]}
    assert new.decode(old.encode(datum)) == {**datum, "colour": "red"}
