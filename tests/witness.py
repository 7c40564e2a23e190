"""Engines' own event classes, loaded from their wheels: what they write, and what changed since the recorded versions.

What lives here: loading the classes, writing one canonical payload with them, and comparing. What must not: an engine's
code; only its bytes are recorded (tests/golden_events.json), which tests/unit/test_golden_events.py decodes.

`make witness` fetches the newest wheels with pip (some hundred MB each, deleted afterwards) and reports fields that the
recorded versions do not have, and payloads that this project reads otherwise. `--record ENGINE VERSION FILE` records
the payload of one version, given the source of its module.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import msgspec

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored
from streams.engines.dialects.interface import DecodedBatch
from streams.engines.dialects.registry import DIALECTS

GOLDEN = Path(__file__).parent / "golden_events.json"

#: The module with the event classes in each engine's wheel.
MODULES = {"vllm": "vllm/distributed/kv_events.py", "sglang": "sglang/srt/disaggregation/kv_events.py"}

#: Block size of the canonical payload, and the engine's names of its blocks: vLLM's are unsigned, SGLang's signed.
BLOCK_SIZE = 4
NAMES = {"vllm": [(1 << 63) + n for n in range(5)], "sglang": [-(1 << 62) - n for n in range(5)]}

#: The values of all fields of the canonical events; a class takes those that it has.
VALUES = {
    "block_size": BLOCK_SIZE,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "locality": "LOCAL",
    "session_id": "s",
}

#: The cache salt of the last store of the payload, in versions whose events have it.
CACHE_SALT = "salt"


def event_classes(source: str) -> dict[str, type[msgspec.Struct]]:
    """Return the classes of a module that are msgspec structs; nothing else of it is run."""
    kept: list[ast.stmt] = []
    structs: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            if "msgspec.Struct" in bases or bases & structs:
                structs.add(node.name)
                node.body = [each for each in node.body if isinstance(each, ast.AnnAssign | ast.Pass)] or [ast.Pass()]
                kept.append(node)
    future = ast.parse("from __future__ import annotations").body
    namespace: dict[str, Any] = {"msgspec": msgspec}
    module = ast.fix_missing_locations(ast.Module(body=future + kept, type_ignores=[]))
    code = compile(module, "kv_events", "exec")
    exec(code, namespace)  # the statements are declarations of fields
    return {name: namespace[name] for name in structs}


def shape(classes: dict[str, type[msgspec.Struct]]) -> dict[str, Any]:
    """Return what the wire has of the classes: their fields in order, and whether they are arrays."""
    named = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
    fields = {name: list(classes[name].__struct_fields__) for name in named}
    return fields | {"array": bool(classes["BlockStored"].__struct_config__.array_like)}


def payload(engine: str, classes: dict[str, type[msgspec.Struct]]) -> bytes:
    """Write the canonical payload: a clear, a store at the root, its children, a removal, and a store with a salt."""
    names = NAMES[engine]

    def made(name: str, **values: Any) -> msgspec.Struct:
        kind = classes[name]
        return kind(**{field: value for field, value in (VALUES | values).items() if field in kind.__struct_fields__})

    def stored(first: int, end: int, parent: int | None, name: str = "BlockStored", **values: Any) -> msgspec.Struct:
        tokens = list(range(first * BLOCK_SIZE, end * BLOCK_SIZE))
        return made(name, block_hashes=names[first:end], parent_block_hash=parent, token_ids=tokens, **values)

    events = [
        made("AllBlocksCleared"),
        stored(0, 1, None),
        stored(1, 4, names[0]),
        made("BlockRemoved", block_hashes=[names[3]]),
    ]
    if "BlockStoredWithMetadata" in classes:
        metadata = classes["BlockStoredMetadata"](cache_salt=CACHE_SALT)
        events.append(stored(4, 5, None, "BlockStoredWithMetadata", metadata=metadata))
    elif {"cache_salt", "extra_keys"} & set(classes["BlockStored"].__struct_fields__):
        events.append(stored(4, 5, None, cache_salt=CACHE_SALT, extra_keys=[(CACHE_SALT,)]))
    return msgspec.msgpack.encode(classes["KVEventBatch"](1.5, events, 0))


def read(decoded: DecodedBatch) -> list[list[Any]]:
    """Return what a decoder has read, as JSON has it."""
    assert not decoded.unusable, decoded.unusable
    assert not decoded.n_unindexed
    out: list[list[Any]] = []
    for event in decoded.events:
        match event:
            case BlocksStored():
                out.append(["stored", event.parent, event.engine.tolist(), event.local.tolist(), event.tier.name])
            case BlocksRemoved():
                out.append(["removed", event.engine.tolist(), event.tier.name])
            case AllBlocksCleared():
                out.append(["cleared"])
    return out


def compare(engine: str, version: str, source: str) -> list[str]:
    """Return what differs from the newest recorded version of the engine."""
    classes = event_classes(source)
    recorded = [each for each in json.loads(GOLDEN.read_text()) if each["engine"] == engine]
    last, now = recorded[-1], shape(classes)
    changes = [
        f"{engine} {version}: {name} is {now[name]}; in {last['version']} it was {last['shape'][name]}"
        for name in now
        if now[name] != last["shape"][name]
    ]
    found = read(DIALECTS["auto"].decoder(BLOCK_SIZE).decode(payload(engine, classes)))
    if found != read(DIALECTS[engine].decoder(BLOCK_SIZE).decode(bytes.fromhex(last["payload"]))):
        changes.append(f"{engine} {version}: the canonical payload is read otherwise: {found}")
    return changes


def fetched(engine: str, folder: Path) -> tuple[str, str]:
    """Fetch the engine's newest wheel; return its version and the source of its event classes."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), engine]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob(f"{engine}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        source = archive.read(MODULES[engine]).decode()
    wheel.unlink()
    return wheel.name.split("-")[1], source


def main() -> int:
    """Compare the newest versions with the recorded ones, or record one."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--record", nargs=3, metavar=("ENGINE", "VERSION", "FILE"))
    record = options.parse_args().record
    if record is not None:
        engine, version, file = record
        classes = event_classes(Path(file).read_text())
        golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else []
        golden = [each for each in golden if (each["engine"], each["version"]) != (engine, version)]
        golden.append(
            {"engine": engine, "version": version, "shape": shape(classes), "payload": payload(engine, classes).hex()}
        )
        golden.sort(key=lambda each: (each["engine"], [int(part) for part in each["version"].split(".")]))
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
        return 0
    changes: list[str] = []
    for engine in MODULES:
        with tempfile.TemporaryDirectory() as folder:
            version, source = fetched(engine, Path(folder))
        found = compare(engine, version, source)
        print(f"{engine} {version}: {'as recorded' if not found else f'{len(found)} changes'}")
        changes += found
    print(*changes, sep="\n")
    return int(bool(changes))


if __name__ == "__main__":
    sys.exit(main())
