"""The AsyncAPI document, as AsyncAPI's own parser reads it, with its parser of Avro."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from streams.kafka.asyncapi import asyncapi
from streams.settings import KafkaSecurity, Settings
from streams.topics import topics
from tools.user_cache import kept

PACKAGES = ("@asyncapi/parser@3.6.3", "@asyncapi/avro-schema-parser@3.0.24")
INSTALL_TIMEOUT_S = 240
PARSE_TIMEOUT_S = 60

PARSE = """
const { Parser } = require('@asyncapi/parser');
const { AvroSchemaParser } = require('@asyncapi/avro-schema-parser');
const parser = new Parser();
parser.registerSchemaParser(AvroSchemaParser());
parser.parse(require('fs').readFileSync(0, 'utf8')).then(({ document, diagnostics }) => console.log(JSON.stringify({
  errors: diagnostics.filter((each) => each.severity === 0),
  addresses: document ? document.channels().all().map((each) => each.address()) : [],
  messages: document ? document.messages().all().length : 0,
  operations: document ? document.operations().all().length : 0,
})));
"""


def install(scratch: Path, folder: Path) -> None:
    """Install the packages into the folder that is kept."""
    npm = shutil.which("npm")
    assert npm is not None
    command = [
        npm,
        "install",
        "--prefix",
        str(folder),
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--silent",
        *PACKAGES,
    ]
    subprocess.run(command, cwd=scratch, check=True, timeout=INSTALL_TIMEOUT_S, stdin=subprocess.DEVNULL)


@pytest.mark.skipif(shutil.which("npm") is None, reason="AsyncAPI's parser is an npm package, and there is no npm")
@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(topic_prefix="team.", kafka="a:1, b:2", kafka_security=KafkaSecurity.SSL, replication=3),
    ],
    ids=["default", "secure"],
)
def test_asyncapis_own_parser_finds_no_error(settings: Settings) -> None:
    """It finds every topic, record and operation, and no error in the document or in any schema."""
    folder = kept(f"asyncapi-{PACKAGES[0].rpartition('@')[2]}-{PACKAGES[1].rpartition('@')[2]}", install)
    node = shutil.which("node")
    assert node is not None
    document = asyncapi(settings)
    done = subprocess.run(
        [node, "-e", PARSE],
        cwd=folder,
        input=json.dumps(document),
        capture_output=True,
        text=True,
        timeout=PARSE_TIMEOUT_S,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["errors"] == []
    assert sorted(found["addresses"]) == sorted(spec.name for spec in topics(settings).all())
    assert found["operations"] == len(document["operations"])
    assert found["messages"] == len(document["components"]["messages"])
