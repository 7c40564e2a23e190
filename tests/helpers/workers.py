"""Faust workers and routers as processes: what they own, answer and have written."""

from __future__ import annotations

import json
import urllib.request

import psutil
from confluent_kafka import KafkaException

from streams.errors import KvStreamsError
from streams.kafka.clients import Record, delete_topics, ensure_topics
from streams.lab.stack import RouterProcess
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.topics import topics
from tests.helpers.api import Api
from tests.helpers.support import VISIBLE_TIMEOUT_S


def owners(process: RouterProcess) -> int:
    """Return the number of partitions in a worker's last logged assignment."""
    lines = process.child.log_path.read_text().splitlines()
    assigned = [line for line in lines if "partitions assigned" in line]
    return len(assigned[-1].partition("[")[2].partition("]")[0].split(",")) if assigned else 0


def put_worker(url: str) -> None:
    body = b'{"url": "http://nowhere", "model": "m", "block_size": 16}'
    with urllib.request.urlopen(urllib.request.Request(f"{url}/workers/1", data=body, method="PUT")) as response:
        assert response.status == 200


def mode(url: str) -> str:
    body = b'{"token_ids": [1, 2, 3], "update_states": false}'
    with urllib.request.urlopen(urllib.request.Request(f"{url}/route", data=body, method="POST")) as response:
        return str(json.loads(response.read())["mode"])


def n_requests(api: Api) -> int:
    return sum(row["active_requests"] for row in api.get("/loads")["loads"])


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def recreate_changelog(settings: Settings) -> str:
    """Delete the index changelog and create it again; return its new id."""
    spec = topics(settings).index_changelog
    delete_topics(settings, [spec])
    ids: list[str] = []

    def created() -> bool:
        try:
            ids.append(ensure_topics(settings, [spec])[spec.name].topic_id)
        except (KvStreamsError, KafkaException):
            return False  # the broker is still deleting the old one
        return True

    wait_for(created, VISIBLE_TIMEOUT_S, "the changelog to exist again")
    return ids[-1]


def changelog(settings: Settings, partition: int, topic: str | None = None) -> dict[bytes, bytes]:
    """Return the last value of each key in a changelog, by default that of the index."""
    found: dict[bytes, bytes] = {}

    def fold(records: list[Record]) -> None:
        for record in records:
            if record.value is None:
                found.pop(record.key, None)
            else:
                found[record.key] = record.value

    read_to_end(settings, topic or topics(settings).index_changelog.name, partition, None, fold)
    return found
