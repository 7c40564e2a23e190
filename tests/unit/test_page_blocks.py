"""Every code block of the docs is executed or checked by a test, or the reason why not is here.

What lives here: which test reads which block, and the checks of blocks that are no part of another test's subject. What
must not: the blocks themselves; a test takes them from the page with tests.helpers.pages.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from click.testing import CliRunner

from streams.cli import cli
from streams.client.migration import MigrationFigures
from streams.engines.address import engine_address, engine_template
from streams.engines.sources.file import engines_of
from streams.frontend.resuming import figures_of
from streams.lab.engines.faults import FaultKind, parse_fault
from streams.picker.messages import DESTINATION
from streams.security.tokens import parse_tokens
from streams.settings import Settings, load, unknown_variables
from tests.helpers.local_router import local_router
from tests.helpers.openapi import check_answer
from tests.helpers.pages import PAGES, ROOT, TOP_PAGES, block_of, blocks, blocks_of, is_pasted

HERE = "unit/test_page_blocks.py::"

#: Pages all of whose Python blocks tests/unit/test_docs.py runs in order.
RUN_AS_A_WHOLE = ("docs/prefix-index.md", "docs/sim.md")

#: Places of blocks, each a page and the beginning of a block, by the test that executes these blocks, or compares them
#: with what the code gives.
TESTED: dict[str, list[tuple[str, str]]] = {
    "kafka/test_client.py::test_the_example_of_the_page_runs_as_it_is": [("docs/client.md", "from streams.client")],
    "kafka/test_cluster.py::test_the_commands_of_the_page_start_and_stop_three_brokers": [
        ("docs/kafka.md", "kvstreams kafka up")
    ],
    "kafka/test_compare.py::test_modes_take_turns_on_a_live_fleet": [
        ("docs/compare.md", "kvstreams compare"),
        ("docs/compare.md", "mode  "),
    ],
    "kafka/test_cxl_pipeline.py::test_the_example_of_the_docs_reports_labels_and_pooled_blocks": [
        ("docs/cxl.md", "from streams.core.events")
    ],
    "kafka/test_decision_log.py::test_a_decision_is_explained_in_words": [("docs/decisions.md", "Request chat-700")],
    "kafka/test_demo.py::test_the_demo_runs_on_a_kafka_that_requires_credentials_and_with_tokens": [
        ("docs/first-request.md", "kvstreams demo")
    ],
    "kafka/test_pasted_docs.py::test_recorded_decisions_are_used_as_the_pages_say": [
        ("docs/decisions.md", "1,500 requests")
    ],
    "kafka/test_pasted_docs.py::test_the_examples_of_the_api_pasted_in_order_into_one_shell_work": [
        ("docs/own-fleet.md", "X-Kvstreams-Worker")
    ],
    "kafka/test_moving.py::test_a_fleet_is_moved_under_load_without_a_wrong_exact_answer": [
        ("docs/replay.md", "kvstreams replay --into")
    ],
    "kafka/test_replay.py::test_the_commands_of_the_page_run_one_after_the_other": [
        ("docs/replay.md", "kvstreams replay\n"),
        ("docs/replay.md", "kvstreams replay --until 15m"),
        ("docs/replay.md", "kvstreams replay --verify"),
        ("docs/replay.md", "kvstreams replay --out"),
        ("docs/replay.md", "kvstreams replay --until 14:03"),
        ("docs/replay.md", "kvstreams topics window"),
    ],
    "kafka/test_verify.py::test_each_single_fault_of_a_router_is_found_and_nothing_else": [
        ("docs/replay.md", "rank 7/0")
    ],
    "kafka/test_up.py::test_everything_runs_on_a_kafka_that_was_started_before_and_leaves_it_running": [
        ("docs/first-request.md", "curl"),
        ("docs/first-request.md", '{"request_id"'),
    ],
    "processes/test_chart.py::test_the_commands_of_the_page_are_understood": [
        ("docs/kubernetes.md", "docker build"),
        ("docs/kubernetes.md", "helm upgrade"),
    ],
    "processes/test_chart.py::test_the_commands_of_the_page_name_objects_of_the_chart": [
        ("docs/kubernetes.md", "TOKEN="),
        ("docs/kubernetes.md", "kubectl"),
    ],
    "processes/test_chart.py::test_the_values_of_the_page_are_valid": [
        ("docs/kubernetes.md", "settings:"),
        ("docs/kubernetes.md", "bridges:"),
        ("docs/kubernetes.md", "picker:"),
        ("docs/kubernetes.md", "strimzi:"),
        ("docs/kubernetes.md", "engineAutoscaling:"),
        ("docs/kubernetes.md", "front:"),
        ("docs/kubernetes.md", "networkPolicy:"),
    ],
    "processes/test_front_apis.py::test_the_page_shows_how_to_use_anthropics_client": [
        ("docs/front.md", "from anthropic")
    ],
    "release/test_wheel.py::test_a_release_is_complete": [("docs/install.md", "make release")],
    "release/test_wheel.py::test_the_wheel_routes_a_request_in_an_empty_environment": [
        ("docs/first-request.md", "python3 -m venv"),
        ("docs/install.md", "pip install"),
    ],
    "unit/test_docs.py::test_the_commands_of_the_readme_are_those_of_the_page_that_is_pasted": [
        ("README.md", "make up"),
        ("README.md", "export"),
    ],
    "unit/test_doctor.py::test_the_page_shows_a_finding_as_it_is_printed": [("docs/doctor.md", "worker 3:")],
    "unit/test_hashing.py::test_the_page_has_the_golden_hashes": [("docs/architecture.md", "local[i]")],
    "unit/test_lab_scaling.py::test_the_page_shows_what_its_commands_print": [("docs/scaling.md", "2,000 requests")],
    "unit/test_named_policies.py::test_the_example_package_is_found_by_its_entry_point": [
        ("docs/quality.md", "pip install ./examples")
    ],
    HERE + "test_a_file_with_settings_is_read": [("docs/tls-and-tokens.md", "kafka =")],
    HERE + "test_a_file_with_tokens_is_read": [("docs/security.md", "[gateway]")],
    HERE + "test_a_router_takes_the_query_for_labels": [("docs/moe.md", '"router_config_override"')],
    HERE + "test_an_engine_takes_the_failure": [("docs/sim.md", '{"kind"')],
    HERE + "test_answers_of_the_api_have_these_fields": [
        ("docs/http.md", '{"error"'),
        ("docs/http.md", '200 {"request_id"'),
        ("docs/http.md", '"kv_sources"'),
    ],
    HERE + "test_prometheus_reads_the_example_of_its_configuration": [("docs/metrics.md", "scrape_configs:")],
    "unit/test_as_code.py::test_the_commands_of_the_page_print_code_and_create_nothing": [
        ("docs/kafka.md", "kvstreams topics create --format")
    ],
    "unit/test_schema_registry.py::test_the_command_registers_every_schema_and_prints_the_setting": [
        ("docs/kafka.md", "kvstreams schemas register")
    ],
    HERE + "test_settings_of_the_pages_exist": [
        ("docs/security.md", "export"),
        ("docs/kafka.md", "export KVSTREAMS_TOPIC_PROFILE"),
        ("docs/kafka.md", "export KVSTREAMS_KAFKA_PROPERTIES"),
        ("docs/kafka.md", "export KVSTREAMS_ROUTER_RACK"),
        ("docs/kafka.md", "pip install 'kvstreams[msk]'"),
    ],
    HERE + "test_targets_modules_and_files_of_commands_exist": [("CONTRIBUTING.md", "make fast")],
    HERE + "test_the_secret_of_the_chart_has_a_file_of_tokens": [("docs/kubernetes.md", "FRONT=")],
    HERE + "test_the_adapter_of_prometheus_finds_the_metric": [("docs/kubernetes.md", "rules:")],
    HERE + "test_gateways_of_the_page_ask_on_the_port_of_pickers": [
        ("docs/gateway.md", "istioctl"),
        ("docs/gateway.md", "apiVersion: inference"),
        ("docs/gateway.md", "apiVersion: gateway"),
    ],
    HERE + "test_the_commands_of_the_laboratory_run": [
        ("docs/quality.md", "kvstreams simulate conversation"),
        ("docs/quality.md", "kvstreams tune"),
    ],
    HERE + "test_the_engine_of_the_laboratory_has_these_parameters": [("docs/quality.md", "prefill  ")],
    HERE + "test_the_engines_of_the_pages_are_understood": [
        ("docs/engines.md", "kvstreams bridge --engine id=1"),
        ("docs/engines.md", "kvstreams bridge --engines-dns"),
        ("docs/engines.md", "kvstreams bridge --engines-inference-pool"),
        ("docs/engines.md", "[[engine]]"),
        ("docs/lmcache.md", "kvstreams bridge --lmcache"),
    ],
    HERE + "test_the_figures_of_a_migration_have_these_fields": [("docs/front.md", '{"kvstreams_migration"')],
    HERE + "test_the_option_of_vllm_is_the_one_that_real_engines_get": [("docs/own-fleet.md", "--kv-events-config")],
    "unit/test_render_parity.py::test_engines_are_probed_once_and_the_difference_is_logged_once": [
        ("docs/front.md", "the engine of worker 2")
    ],
}

#: Blocks that nothing executes, and why.
NOT_RUN = {
    ("README.md", " engine"): "a picture",
    ("docs/bookings.md", "own prefill"): "formulas; tests/unit/test_cost_selection.py computes them on its own",
    ("docs/install.md", "docker build"): (
        "needs a container engine; tests/release/test_compose.py executes the Dockerfile's steps without one"
    ),
    ("docs/install.md", "docker compose"): (
        "needs a container engine; tests/release/test_compose.py starts each service as written without one"
    ),
    ("docs/quality.md", "python3 -m venv .venv-dynamo"): "downloads NVIDIA Dynamo, and takes minutes",
    ("docs/quality.md", "scale *"): "a formula; tests/unit/test_named_policies.py computes it on its own",
    ("docs/quality.md", "python -m benchmarks.quality"): "draws the plots of the page for hours",
    ("docs/scaling.md", "replicas wanted"): "a formula; tests/unit/test_scaling.py computes it on its own",
}


class Block(NamedTuple):
    """A code block. line: where it begins."""

    page: str
    line: int
    language: str
    code: str

    @property
    def runs_by_itself(self) -> bool:
        """Whether a journey, tests/unit/test_docs.py, or a browser executes it without being listed here."""
        whole = self.language == "python" and self.page in RUN_AS_A_WHOLE
        # tests/browser/test_site.py looks at every diagram.
        return self.language == "mermaid" or whole or is_pasted(self.page, self.language, self.code)

    def is_at(self, place: tuple[str, str]) -> bool:
        """Whether it is on this page and begins like this."""
        return self.page == place[0] and self.code.startswith(place[1])


PLACES = (*(place for places in TESTED.values() for place in places), *NOT_RUN)

BLOCKS = tuple(Block(page, *found) for page in (*TOP_PAGES, *PAGES) for found in blocks_of(page))


@pytest.mark.parametrize("block", BLOCKS, ids=[f"{block.page}:{block.line}" for block in BLOCKS])
def test_each_block_is_tested_in_one_way(block: Block) -> None:
    """A new block is pasted by a journey, or read by a test that is named here, or has a reason here."""
    places = [place for place in PLACES if block.is_at(place)]
    assert len(places) == (0 if block.runs_by_itself else 1), f"{block.page}:{block.line} is tested by {places}"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ":".join(place))
def test_each_entry_is_about_a_block_that_is_there(place: tuple[str, str]) -> None:
    """An entry goes with its block."""
    assert any(block.is_at(place) for block in BLOCKS)


@pytest.mark.parametrize("test", TESTED)
def test_the_tests_read_the_pages(test: str) -> None:
    """A test that has a copy of the block in place of the page would not notice a change of the page."""
    file, _, name = test.partition("::")
    reads, functions = read_by(file)
    assert name in functions, f"there is no {test}"
    assert {page for page, _ in TESTED[test]} <= reads, f"tests/{file} does not read its pages"


@cache
def read_by(file: str) -> tuple[frozenset[str], frozenset[str]]:
    """The pages that a file of tests names outside of docstrings, and its functions."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    expressions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in expressions]
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(text.value for text in texts if isinstance(text.value, str)), frozenset(functions)


def test_every_fence_is_a_block() -> None:
    """A fence that is indented, or made of other characters, would not be seen."""
    for page in (*TOP_PAGES, *PAGES):
        fences = re.findall(r"^\s*(?:```|~~~)", (ROOT / page).read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(blocks_of(page)), page


# -- commands ----------------------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, list[str]]]:
    """Each line of each shell block in words, with its page. Lines that begin with no plain word are left out."""
    lines = [
        (page, line)
        for page in (*TOP_PAGES, *PAGES)
        for _, code in blocks(page, "sh")
        for line in code.replace("\\\n", " ").splitlines()
    ]
    plain = re.compile(r"[\w./-]+ (?!.*<<)[^']*('[^']*'[^']*)*")
    return [(page, shlex.split(line, comments=True)) for page, line in lines if plain.fullmatch(line)]


def test_targets_modules_and_files_of_commands_exist() -> None:
    """`make X` is a target, `python -m X` a module of this repository, and a path in it a file."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    n_checked = 0
    for page, (command, *words) in commands():
        if command == "make":
            assert words[0] in targets, f"{page}: make {words[0]}"
        if command == "python" and words[0] == "-m":
            assert importlib.util.find_spec(words[1]), f"{page}: {words[1]}"
        paths = [word for word in words if re.match(r"(\./)?(tests|docker|deploy|examples)/", word)]
        assert all((ROOT / path).exists() for path in paths), f"{page}: {paths}"
        n_checked += command in ("make", "python") or bool(paths)
    assert n_checked > 10
    assert "CONTRIBUTING.md" in {page for page, _ in commands()}


def test_settings_of_the_pages_exist() -> None:
    """A KVSTREAMS_ variable in a block has an effect."""
    names = {name for block in BLOCKS for name in re.findall(r"\bKVSTREAMS_[A-Z_]+", block.code)}
    assert unknown_variables(dict.fromkeys(names, "")) == {}
    assert "KVSTREAMS_KAFKA_TLS_CA" in block_of("docs/security.md", "export")
    assert "KVSTREAMS_KAFKA_OAUTH_PROVIDER" in block_of("docs/kafka.md", "pip install")


def test_the_engines_of_the_pages_are_understood(tmp_path: Path) -> None:
    """Each --engine and --engine-template of every page, and the file of engines."""
    n_engines = 0
    for _, words in commands():
        for option, value in pairwise(words):
            if option == "--engine" and value.startswith("id="):
                assert engine_address(value).events, value
                n_engines += 1
            if option == "--engine-template":
                assert engine_template(value, ports="--engines-inference-pool" in words), value
                n_engines += 1
    assert n_engines >= 10
    file = tmp_path / "engines.toml"
    file.write_text(block_of("docs/engines.md", "[[engine]]"))
    (engine,) = engines_of(str(file))
    assert (engine.dp_size, engine.taints) == (8, ("spot",))


def test_the_commands_of_the_laboratory_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `kvstreams simulate` and `kvstreams tune` of docs/quality.md, with small traces in place of the reader's."""
    monkeypatch.chdir(tmp_path)
    lines = [
        {"timestamp": 50 * n, "input_length": 1100, "output_length": 4, "hash_ids": [n % 3, 10 + n % 5, 100 + n]}
        for n in range(24)
    ]
    n_run = 0
    for page, words in commands():
        if page != "docs/quality.md" or words[0] != "kvstreams" or words[1] not in ("simulate", "tune"):
            continue
        name, *rest = [word.replace("longest-prefix:blocks_per_request=10", "kv") for word in words[2:]]
        rest = [word.replace("longest-prefix", "random") for word in rest]
        if name.endswith(".jsonl"):
            Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            name += ":requests=24"
        trials = ["--trials", "2"] if words[1] == "tune" else []
        done = CliRunner().invoke(cli, [words[1], name, *rest, *trials], catch_exceptions=False)
        assert done.exit_code == 0, f"{words}: {done.output}"
        n_run += 1
    assert n_run == 6


# -- files and bodies --------------------------------------------------------------------------------------------------


def test_a_file_with_tokens_is_read() -> None:
    """Each table of docs/security.md has the rights that its comments say."""
    text = block_of("docs/security.md", "[gateway]")
    for number in range(text.count('"…"')):
        text = text.replace('"…"', f'"{number:064x}"', 1)
    tokens = parse_tokens([("tokens.toml", text)])
    grant = tokens.grant_of(f"{2:064x}")
    assert grant is not None
    assert (grant.tenant, grant.priority_max) == ("team-a", 5)


def test_a_file_with_settings_is_read(tmp_path: Path) -> None:
    """The example of docs/tls-and-tokens.md has the names and types of settings."""
    file = tmp_path / "kvstreams.toml"
    file.write_text(block_of("docs/tls-and-tokens.md", "kafka ="))
    settings = load({}, {}, config_file=file).settings
    assert (settings.kafka_security, settings.kafka_sasl_username) == ("sasl_ssl", "router")


def test_an_engine_takes_the_failure() -> None:
    """The body of docs/sim.md arms a fault."""
    fault = parse_fault(json.loads(block_of("docs/sim.md", '{"kind"')))
    assert fault is not None and (fault.kind, fault.after_tokens) == (FaultKind.DIE, 500)


def test_a_router_takes_the_query_for_labels() -> None:
    """The fragment of docs/moe.md, in a request; no block has labels, so all ranks remain only with the fallback."""
    override = json.loads("{" + block_of("docs/moe.md", '"router_config_override"') + "}")
    with local_router(Settings()) as served:
        answer = served.api.route(token_ids=list(range(64)), **override)
    assert answer["moe_filter_applied"] is False


def test_answers_of_the_api_have_these_fields() -> None:
    """Each answer that docs/http.md shows is one that the OpenAPI document allows, with these fields and types."""
    body = block_of("docs/http.md", '200 {"request_id"').removeprefix("200 ")
    check_answer("POST", "/route", 200, "application/json", body.encode())
    answer = {**json.loads(body), **json.loads("{" + block_of("docs/http.md", '"kv_sources"') + "}")}
    check_answer("POST", "/route", 200, "application/json", json.dumps(answer).encode())
    error = block_of("docs/http.md", '{"error"').replace("{...}", "{}")
    check_answer("POST", "/route", 503, "application/json", error.encode())


def test_the_figures_of_a_migration_have_these_fields() -> None:
    """docs/front.md shows the last chunk of a stream that migrated."""
    shown = json.loads(block_of("docs/front.md", '{"kvstreams_migration"'))["kvstreams_migration"]
    given = figures_of(MigrationFigures(migrations=1), by_text=False)
    assert {name: type(value) for name, value in shown.items()} == {name: type(value) for name, value in given.items()}
    assert shown["resumed_by"] == given["resumed_by"]


def test_the_option_of_vllm_is_the_one_that_real_engines_get() -> None:
    """tests/real starts vLLM with the option of docs/own-fleet.md, and docs/engines.md has the same."""
    shown = block_of("docs/own-fleet.md", "--kv-events-config")
    assert shown.strip() in (ROOT / "docs/engines.md").read_text()
    option, text = shlex.split(shown)
    assert option == "--kv-events-config"
    assert json.loads(text) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
    }
    assert 'block_of("docs/own-fleet.md", "--kv-events-config")' in (ROOT / "tests/real/engine.py").read_text()


def test_the_engine_of_the_laboratory_has_these_parameters() -> None:
    """The formulas of docs/quality.md have the numbers of the file that it names."""
    parameters: dict[str, Any] = tomllib.loads((ROOT / "streams/lab/simulation/engine_8b.toml").read_text())
    wanted = [*parameters["prefill_ms"], parameters["decode_ms_min"], *map(abs, parameters["decode_ms"])]
    numbers = re.findall(r"(?<![\w.])\d[\d.]*(?:e-\d+)?", block_of("docs/quality.md", "prefill  "))
    assert [float(number) for number in numbers] == wanted


def test_the_secret_of_the_chart_has_a_file_of_tokens(tmp_path: Path) -> None:
    """The commands before kubectl write a file that every process accepts, and its own token for each of them."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    script = block_of("docs/kubernetes.md", "FRONT=").partition("kubectl")[0] + 'echo "$FRONT"'
    shown = subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    tokens = parse_tokens([("tokens.toml", (tmp_path / "tokens.toml").read_text())])
    grant = tokens.grant_of(shown.strip())
    assert grant is not None and (grant.name, sorted(grant.rights)) == ("front", ["read", "route"])


def test_the_adapter_of_prometheus_finds_the_metric() -> None:
    """The rule of docs/kubernetes.md is YAML, and tests/unit/test_chart.py checks that its metric exists."""
    (rule,) = yaml.safe_load(block_of("docs/kubernetes.md", "rules:"))["rules"]["external"]
    assert rule["seriesQuery"] == "kvstreams_pool_replicas_wanted"
    assert rule["resources"] == {"namespaced": False}


def test_gateways_of_the_page_ask_on_the_port_of_pickers() -> None:
    """The resources of docs/gateway.md are YAML and name picker_port. No gateway of Kubernetes runs in a test."""
    assert "ENABLE_GATEWAY_API_INFERENCE_EXTENSION=true" in block_of("docs/gateway.md", "istioctl")
    pool = yaml.safe_load(block_of("docs/gateway.md", "apiVersion: inference"))
    assert pool["spec"]["endpointPickerRef"]["port"]["number"] == Settings().picker_port
    extension, traffic = yaml.safe_load_all(block_of("docs/gateway.md", "apiVersion: gateway"))
    assert extension["spec"]["extProc"][0]["backendRefs"][0]["port"] == Settings().picker_port
    (source,) = traffic["spec"]["loadBalancer"]["endpointOverride"]["extractFrom"]
    assert source == {"header": DESTINATION}


def test_prometheus_reads_the_example_of_its_configuration(tmp_path: Path) -> None:
    """The example of docs/metrics.md; promtool checks it where it is installed."""
    text = block_of("docs/metrics.md", "scrape_configs:")
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert all(re.fullmatch(r"[\w-]+:\d+", target) for each in job["static_configs"] for target in each["targets"])
    if shutil.which("promtool"):
        (tmp_path / "prometheus.yml").write_text(text)
        subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True)
