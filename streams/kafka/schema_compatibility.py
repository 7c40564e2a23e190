"""Whether the schemas of this version read the records of the last release, checked when a process starts.

What lives here: the comparison of the schemas with those in their folder `released`. What must not: reading records
(records).

`schemas/released/` has the schemas of the last release; until there is one, those of the first version, 0.1.0. Topics
and tables have records that were written with them, and these records must be readable after an upgrade.
"""

from __future__ import annotations

from pathlib import Path

from streams.errors import SchemasIncompatible
from streams.kafka.avro_frames import RELEASED, schemas_dir


def check_schemas(folder: Path | None = None) -> None:
    """Raise SchemasIncompatible if a schema cannot read what the last release wrote with it.

    Without any difference, this takes a millisecond: only then the `avro` package, whose import takes 20, is needed.
    """
    folder = folder or schemas_dir()
    problems: list[str] = []
    for released in sorted((folder / RELEASED).glob("*.avsc")):
        current = folder / released.name
        if not current.is_file():
            problems.append(f"{released.stem} no longer exists")
        elif current.read_bytes() != released.read_bytes():
            problems += _differences(current, released)
    if problems:
        raise SchemasIncompatible(
            f"the schemas in {folder} cannot read the records of the last release: {'; '.join(problems)}",
            remedy="Install kvstreams anew. If you changed a schema, give each new field a default and remove no value",
        )


def _differences(reader_file: Path, writer_file: Path) -> list[str]:
    from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
    from avro.errors import AvroException
    from avro.schema import parse

    try:
        reader, writer = parse(reader_file.read_text()), parse(writer_file.read_text())
    except (AvroException, ValueError) as exc:
        return [f"{reader_file.stem} cannot be parsed ({_one_line(exc)})"]
    compared = ReaderWriterCompatibilityChecker().get_compatibility(reader, writer)
    if compared.compatibility is SchemaCompatibilityType.compatible:
        return []
    kinds = ", ".join(sorted({kind.value.replace("_", " ") for kind in compared.incompatibilities}))
    what, where = (", ".join(sorted(map(str, texts))) for texts in (compared.messages, compared.locations))
    return [f"{reader_file.stem} ({kinds}: {what}; at {where})"]


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc).split())
