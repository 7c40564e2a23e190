"""Topics and ACLs as code: each form says what streams.topics and streams.security.acls say, and nothing else."""

from __future__ import annotations

import json
import shlex
from typing import Any

import jsonschema
import yaml
from click.testing import CliRunner

from streams.cli import cli
from streams.security.acls import Acl, acls_of
from streams.security.as_code import PROCESSES, CodeFormat, as_code, user_of
from streams.settings import Settings, TopicProfile
from streams.topics import topics
from tests.helpers.crds import definition_of
from tests.helpers.pages import block_of
from tests.helpers.strimzi import acls_of_user

#: A prefix with characters that Kubernetes and Terraform do not have in names.
SETTINGS = Settings(topic_prefix="Team_A.", partitions=5, replication=3, topic_profile=TopicProfile.REDPANDA)
TOPICS = {spec.name: (spec.partitions, spec.replication, dict(spec.config)) for spec in topics(SETTINGS).all()}
ACLS = {user_of(process, SETTINGS): flat for process in PROCESSES for flat in [set(acls_of(process, SETTINGS))]}

#: A resource type of Kafka, a resource, whether it is a prefix, an operation.
Allowed = tuple[str, str, bool, str]


def single(acls: set[Acl]) -> set[Allowed]:
    return {(acl.kind, acl.name, acl.prefixed, operation) for acl in acls for operation in acl.operations}


def test_strimzi_gets_the_topics_and_users_of_the_scope() -> None:
    """Each document is valid by Strimzi's own definitions, and its operators make exactly our topics and ACLs."""
    documents: list[dict[str, Any]] = list(yaml.safe_load_all(as_code(CodeFormat.STRIMZI, SETTINGS, "main")))
    for each in documents:
        jsonschema.Draft202012Validator(definition_of(each)).validate(each)
        assert each["metadata"]["labels"] == {"strimzi.io/cluster": "main"}
    found = {
        each["spec"]["topicName"]: (each["spec"]["partitions"], each["spec"]["replicas"], each["spec"]["config"])
        for each in documents
        if each["kind"] == "KafkaTopic"
    }
    assert found == TOPICS
    users = [each for each in documents if each["kind"] == "KafkaUser"]
    assert len({each["metadata"]["name"] for each in users}) == len(users)
    assert [set(acls_of_user(each)) for each in users] == list(ACLS.values())


def test_terraform_gets_the_topics_and_acls_of_the_scope() -> None:
    """One resource for each topic, and one for each operation of each user."""
    code = json.loads(as_code(CodeFormat.TERRAFORM, SETTINGS, ""))["resource"]
    found = {
        each["name"]: (each["partitions"], each["replication_factor"], each["config"])
        for each in code["kafka_topic"].values()
    }
    assert found == TOPICS
    kinds = {"Topic": "topic", "Group": "group", "TransactionalID": "transactional-id"}
    acls: dict[str, set[Allowed]] = {}
    for each in code["kafka_acl"].values():
        assert (each["acl_host"], each["acl_permission_type"]) == ("*", "Allow")
        prefixed = {"Prefixed": True, "Literal": False}[each["resource_pattern_type_filter"]]
        allowed = kinds[each["resource_type"]], each["resource_name"], prefixed, each["acl_operation"]
        acls.setdefault(each["acl_principal"].removeprefix("User:"), set()).add(allowed)
    assert acls == {user: single(each) for user, each in ACLS.items()}


def options(line: str) -> dict[str, list[str]]:
    """The options of a command, without the command itself."""
    words, found = shlex.split(line)[1:], dict[str, list[str]]()
    while words:
        name = words.pop(0)
        found.setdefault(name, [])
        if words and not words[0].startswith("--"):
            found[name].append(words.pop(0))
    return found


def test_kafkas_own_tools_get_the_topics_and_acls_of_the_scope() -> None:
    """One command for each topic and for each resource of each user, with words that a shell takes as they are."""
    lines = as_code(CodeFormat.KAFKA_TOPICS, SETTINGS, "").splitlines()
    found, acls = {}, dict[str, set[Allowed]]()
    for line in lines:
        given = options(line)
        assert given["--bootstrap-server"] == [SETTINGS.kafka]
        if line.startswith("kafka-topics "):
            config = dict(each.split("=", 1) for each in given["--config"])
            numbers = int(given["--partitions"][0]), int(given["--replication-factor"][0])
            found[given["--topic"][0]] = (*numbers, config)
        else:
            (kind,) = {"--topic", "--group", "--transactional-id"} & given.keys()
            prefixed = given.get("--resource-pattern-type") == ["prefixed"]
            allowed = {(kind[2:], given[kind][0], prefixed, each) for each in given["--operation"]}
            acls.setdefault(given["--allow-principal"][0].removeprefix("User:"), set()).update(allowed)
    assert found == TOPICS
    assert acls == {user: single(each) for user, each in ACLS.items()}


def test_the_commands_of_the_page_print_code_and_create_nothing() -> None:
    """There is one for each form. No broker runs at the default address, and they do not ask for one."""
    lines = block_of("docs/kafka.md", "kvstreams topics create --format").splitlines()
    commands = [shlex.split(line)[1:] for line in lines]
    assert {options(" ".join(command))["--format"][0] for command in commands} == set(CodeFormat)
    for command in commands:
        done = CliRunner().invoke(cli, [*command, "--topic-prefix", "x-"])
        assert done.exit_code == 0, done.output
        form = CodeFormat(command[command.index("--format") + 1])
        assert done.stdout == as_code(form, Settings(topic_prefix="x-"), "my-cluster")
