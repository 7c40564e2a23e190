"""Definitions of custom resources that the chart makes, as strict JSON schemas. README.md says where they are from."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml


def definition_of(resource: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema of an object's kind and version; None if Kubernetes itself defines it."""
    return _definitions().get((resource["apiVersion"], resource["kind"]))


@cache
def _definitions() -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for file in Path(__file__).parent.glob("*.yaml"):
        for definition in yaml.safe_load_all(file.read_text()):
            spec = definition["spec"]
            for version in spec["versions"]:
                name = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                schema = _strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                found[name] = schema
    return found


def _strict(schema: Any) -> Any:
    """Refuse fields that a definition lacks. An API server drops them without a word."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if "properties" in schema and "additionalProperties" not in schema and schema.get("type") == "object":
        strict["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return strict
