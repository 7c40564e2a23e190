"""Write what the Helm chart knows of settings and ACLs, from the code.

What lives here: which settings a process of the chart may be given, and the three files that follow from the code. What
must not: anything else of the chart, which is written by hand.

    .venv/bin/python -m tools.chart

Run it after a change of streams/settings.py or streams/security/acls.py. A test fails until the files are up to date.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from streams.security.acls import TOPIC_OPERATIONS, acls_of
from streams.settings import (
    SECRETS,
    AccessSettings,
    AgentSettings,
    BridgeServerSettings,
    FrontServerSettings,
    GatewaySettings,
    KafkaSettings,
    LogSettings,
    PickerServerSettings,
    ResetSettings,
    RouterServerSettings,
    Settings,
    TopicSettings,
)

CHART = Path(__file__).parents[1] / "deploy/helm/kvstreams"

#: The settings of each process. Workers of the chart have no router.
PROCESSES = {
    "worker": (AgentSettings, LogSettings),
    "router": (RouterServerSettings,),
    "front": (FrontServerSettings,),
    "bridge": (BridgeServerSettings,),
    "picker": (PickerServerSettings,),
}

#: Settings that follow from other values of the chart, and these: a reset would empty the scope at each restart of a
#: pod; real-time threads need a capability that the containers do not have; the volume's path and the ports are fixed;
#: and there is no gateway of ours.
NOT_IN_THE_CHART = frozenset(
    {"data_dir", "router_realtime", "process_port", "picker_port", "picker_health_port"}
    | SECRETS
    | {
        setting.name
        for group in (KafkaSettings, AccessSettings, GatewaySettings, ResetSettings)
        for setting in fields(group)
    }
)

#: All processes of a scope must have the same values of these.
SHARED = frozenset(setting.name for setting in fields(TopicSettings))

_TYPES: Mapping[type, Mapping[str, str]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
}


def settings_of(process: str) -> list[str]:
    """Names of the settings that a process has and the chart sets, in alphabetical order."""
    return sorted({setting.name for group in PROCESSES[process] for setting in fields(group)} - NOT_IN_THE_CHART)


def schema_of(name: str) -> dict[str, Any]:
    """The JSON schema of a setting's value."""
    setting = Settings.__dataclass_fields__[name]
    kind: Any = get_type_hints(Settings)[name]
    schema: dict[str, Any] = {"description": setting.metadata["help"]}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        schema["enum"] = [str(member) for member in kind]
    elif get_origin(kind) is dict:
        schema |= {"type": "object", "additionalProperties": _TYPES[get_args(kind)[1]]}
    elif get_origin(kind) is tuple:
        schema |= {"type": "array", "items": _TYPES[get_args(kind)[0]]}
    else:
        schema |= _TYPES[kind]
    for key, limit in (("minimum", "low"), ("maximum", "high")):
        if setting.metadata.get(limit) is not None:
            schema[key] = setting.metadata[limit]
    return schema


def definitions() -> dict[str, Any]:
    """The schemas of `settings` and of each process's settings, for the schema of the values."""
    names = sorted({name for process in PROCESSES for name in settings_of(process)})
    found = {"settings": _strict({name: schema_of(name) for name in names})}
    for process in PROCESSES:
        own = (name for name in settings_of(process) if name not in SHARED)
        found[f"{process}Settings"] = _strict({name: {"$ref": f"#/$defs/settings/properties/{name}"} for name in own})
    return found


def _strict(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def settings_file() -> dict[str, Any]:
    """The settings of each process, and the defaults that templates compute with."""
    defaults = Settings()
    computed_with = sorted(SHARED - {"model_block_sizes", "schema_ids"} | {"drain_notice_s", "drain_timeout_s"})
    return {
        "processes": {process: settings_of(process) for process in PROCESSES},
        "defaults": {name: getattr(defaults, name) for name in computed_with},
    }


def acls_file() -> dict[str, Any]:
    """The least ACLs of each process that uses Kafka. Groups and transactional ids begin with the app id."""
    defaults = Settings()
    found: dict[str, Any] = {}
    for process in ("worker", "router", "bridge"):
        others = [acl for acl in acls_of(process, defaults) if acl.kind != "topic"]
        found[process] = {
            "topics": {field: list(operations) for field, operations in TOPIC_OPERATIONS[process].items()},
            "groups": _suffixes((acl.name, acl.operations) for acl in others if acl.kind == "group"),
            "transactionalIds": _suffixes((acl.name, acl.operations) for acl in others if acl.prefixed),
        }
    return found


def _suffixes(named: Iterable[tuple[str, tuple[str, ...]]]) -> list[dict[str, Any]]:
    app_id = Settings().app_id
    return [{"suffix": name.removeprefix(app_id), "operations": list(operations)} for name, operations in named]


def generated() -> dict[Path, str]:
    """The files' contents by path. JSON is YAML as well."""
    schema = CHART / "values.schema.json"
    values = json.loads(schema.read_text())
    values["$defs"] |= definitions()
    return {
        schema: _text(values),
        CHART / "files/settings.yaml": "# Made by tools/chart.py.\n" + _text(settings_file()),
        CHART / "files/acls.yaml": "# Made by tools/chart.py.\n" + _text(acls_file()),
    }


def _text(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text)
