"""A reader of the file of `kvstreams replay --out` that knows nothing but docs/replay.md and docs/architecture.md.

What lives here: the lines by kind, and what they hold. What must not: anything of `streams` but the names of ids.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import xxhash

#: Worker, rank, tier and sequence hash of a block that is held.
Held = tuple[int, int, str, int]


class StateFile:
    """The lines of a file by their kind. Raises AssertionError if it is not complete."""

    def __init__(self, file: Path) -> None:
        lines = [json.loads(line) for line in file.read_bytes().splitlines()]
        assert lines[0]["kind"] == "scope"
        assert lines[0]["format"] == 1
        assert lines[-1] == {"kind": "end", "lines": len(lines)}
        self.scope: dict[str, Any] = lines[0]
        self.lines: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in lines[1:-1]:
            self.lines[line["kind"]].append(line)

    def held(self) -> set[Held]:
        """Every block that a rank holds, with the hashes that follow from the local ones."""
        held: set[Held] = set()
        for line in self.lines["blocks"]:
            chain = chained(line["parent"], line["local_hashes"])
            assert chain == line["sequence_hashes"]
            assert len(chain) == len(line["engine_hashes"])
            assert (line["parent"] is None) == (line["start"] == 0)
            held |= {(line["worker_id"], line["dp_rank"], line["tier"], block) for block in chain}
        return held

    def labels(self) -> dict[tuple[int, int, int], tuple[int | None, ...]]:
        """The labels of each block of each rank that has some."""
        return {
            (line["worker_id"], line["dp_rank"], block): (each["layer_id"], each["expert_id"], each["expert_group"])
            for line in self.lines["blocks"]
            for each in line["labels"]
            for block in line["sequence_hashes"][each["first"] : each["first"] + each["n_blocks"]]
        }


def chained(parent: int | None, local: list[int]) -> list[int]:
    """The sequence hashes of blocks after a parent."""
    chain: list[int] = []
    for block in local:
        before = chain[-1] if chain else parent
        chain.append(block if before is None else xxhash.xxh3_64_intdigest(struct.pack("<QQ", before, block), 1337))
    return chain
