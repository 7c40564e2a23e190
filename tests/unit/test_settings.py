"""Every setting: where its value comes from, what is refused, and how it reaches a child process."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from streams.core.routing.queue import QueuePolicy
from streams.core.routing.selection import RouterMode
from streams.errors import SettingsError
from streams.settings import (
    CONFIG_FILE_DEFAULT,
    HISTORY_WINDOW_S_MAX,
    NUMBER_MAX,
    SECRETS,
    SESSION_FIELDS,
    UNNEEDED_OPTIONS,
    WEIGHT_MAX,
    BodyPriority,
    KafkaSecurity,
    KvTransfer,
    SaslMechanism,
    Settings,
    TopicProfile,
    as_environ,
    load,
    shown_value,
)
from tests.helpers.pages import ROOT

#: What takes the whole settings: it shows any of them, or hands them on to processes of every kind.
TAKES_ALL_SETTINGS = {
    "settings.py: Resolved.settings",
    "settings.py: shown_value(settings)",
    "lab/stack.py: RouterProcess.settings",
    "lab/stack.py: Stack.__init__(settings)",
}

SETTINGS = [setting.name for setting in fields(Settings)]

#: Every setting with a range: its lowest and its highest value.
RANGES: dict[str, tuple[float, float]] = {
    "partitions": (1, 1024),
    "history_window_s": (0.0, HISTORY_WINDOW_S_MAX),
    "replication": (1, 7),
    "block_size": (1, 4096),
    "port": (0, 65535),
    "metrics_port": (0, 65535),
    "kv_overlap_score_weight": (0.0, WEIGHT_MAX),
    "router_temperature": (0.0, WEIGHT_MAX),
    "kv_overlap_score_credit": (0.0, WEIGHT_MAX),
    "decode_active_request_weight": (0.0, WEIGHT_MAX),
    "recent_prefill_weight": (0.0, WEIGHT_MAX),
    "expected_time_uncached_weight": (0.0, WEIGHT_MAX),
    "expected_time_decode_weight": (0.0, WEIGHT_MAX),
    "expected_time_queue_ms": (0.0, 86_400_000.0),
    "kv_bytes_per_token": (1, 1 << 40),
    "pool_load_gb_per_s": (0.0, WEIGHT_MAX),
    "router_seed": (0, NUMBER_MAX),
    "encoder_cuda_to_cpu_ratio": (0.001, WEIGHT_MAX),
    "router_ttl_s": (0.01, 86_400.0),
    "router_predicted_ttl_s": (0.0, 86_400.0),
    "active_decode_blocks_threshold": (0.0, 100.0),
    "active_prefill_tokens_threshold": (0, NUMBER_MAX),
    "router_min_initial_workers": (0, 1_000_000),
    "router_session_affinity_ttl_s": (0.0, 31_536_000.0),
    "router_avoid_s": (0.0, 600.0),
    "router_event_threads": (1, 64),
    "router_queue_backlog_ms": (0.0, 86_400_000.0),
    "prefill_us_per_token": (0.001, 1e6),
    "router_queue_timeout_s": (0.001, 3600.0),
    "router_queue_requests_max": (1, NUMBER_MAX),
    "router_queue_tenant_requests_max": (1, NUMBER_MAX),
    "scale_saturation_target": (0.05, 1.0),
    "router_queue_bytes_max": (65_536, NUMBER_MAX),
    "cxl_score_weight": (0.0, WEIGHT_MAX),
    "moe_score_weight": (0.0, WEIGHT_MAX),
    "booking_ttl_s": (1.0, 30 * 86_400.0),
    "request_tokens_max": (1, NUMBER_MAX),
    "body_bytes_max": (1024, NUMBER_MAX),
    "bodies_bytes_max": (65_536, NUMBER_MAX),
    "first_request_timeout_s": (0.1, 3600.0),
    "body_timeout_s": (0.1, 3600.0),
    "connections_max": (1, NUMBER_MAX),
    "processes": (1, 64),
    "process_port": (0, 65535),
    "drain_notice_s": (0.0, 3600.0),
    "drain_timeout_s": (0.1, 3600.0),
    "front_requests_max": (1, NUMBER_MAX),
    "front_attempts_max": (1, 64),
    "front_no_worker_wait_s": (0.0, 3600.0),
    "front_silence_timeout_s": (0.1, 86_400.0),
    "front_answer_timeout_s": (0.1, 86_400.0),
    "front_client_timeout_s": (0.1, 86_400.0),
    "front_remote_prefill_tokens_min": (0, NUMBER_MAX),
    "front_prefill_backlog_tokens_max": (0, NUMBER_MAX),
    "front_transfer_timeout_s": (0.0, 60.0),
    "front_bootstrap_port": (1, 65535),
    "front_kv_pull_tokens_min": (0, NUMBER_MAX),
    "router_kv_p2p_port": (0, 65535),
    "front_stall_timeout_s": (0.05, 86_400.0),
    "front_migrations_max": (0, 64),
    "front_migration_timeout_s": (0.1, 86_400.0),
    "gateway_port": (1, 65535),
    "gateway_admin_port": (1, 65535),
    "gateway_threads": (0, 1024),
    "picker_port": (0, 65535),
    "picker_health_port": (0, 65535),
    "picker_fallbacks": (0, 16),
    "tokenizer_processes": (1, 64),
    "tokenizer_cache_mb": (0, NUMBER_MAX),
    "stale_after_ms": (100, NUMBER_MAX),
    "behind_after_ms": (10, NUMBER_MAX),
    "worker_grace_s": (1.0, 30 * 86_400.0),
    "clear_degraded_after_s": (0.0, 30 * 86_400.0),
    "session_timeout_s": (1.0, 1800.0),
    "transaction_timeout_ms": (1000, NUMBER_MAX),
    "batch_records_max": (1, NUMBER_MAX),
    "queue_records_high": (1, NUMBER_MAX),
    "queue_bytes_high": (1, NUMBER_MAX),
    "table_standbys": (0, 8),
    "rocksdb_cache_mb": (1, NUMBER_MAX),
    "retention_ms": (60_000, NUMBER_MAX),
    "decision_log_share": (0.0, 1.0),
    "decision_log_candidates": (0, 64),
    "decision_log_retention_ms": (60_000, NUMBER_MAX),
    "decision_log_bytes_max": (1 << 26, NUMBER_MAX),
    "cxl_evicted_ttl_s": (1.0, 30 * 86_400.0),
    "bridge_lease_s": (0.3, 600.0),
    "metrics_interval_s": (0.0, 180.0),
    "lmcache_unconfirmed_ttl_s": (0.0, 30 * 86_400.0),
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a folder without a kvstreams.toml."""
    monkeypatch.chdir(tmp_path)


def toml(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_setting_without_a_value_has_its_default() -> None:
    """Without command line, environment and file, every setting has its default, and its source is "default"."""
    resolved = load({}, {})
    assert resolved.settings == Settings()
    assert dict(resolved.sources) == dict.fromkeys(SETTINGS, "default")


def test_precedence_is_command_line_environment_file_default(tmp_path: Path) -> None:
    """The first of these sources that has a value wins, and every setting has its source."""
    file = toml(tmp_path / "some.toml", "port = 1\npartitions = 2\nblock_size = 3\n")
    environ = {"KVSTREAMS_PORT": "10", "KVSTREAMS_PARTITIONS": "20"}
    resolved = load({"port": 100, "partitions": None}, environ, file)
    settings = resolved.settings
    assert (settings.port, settings.partitions, settings.block_size, settings.host) == (100, 20, 3, "127.0.0.1")
    expected = {
        "port": "command line",
        "partitions": "KVSTREAMS_PARTITIONS",
        "block_size": str(file),
    }
    assert dict(resolved.sources) == dict.fromkeys(SETTINGS, "default") | expected


def test_the_file_in_the_current_folder_is_read(tmp_path: Path) -> None:
    """kvstreams.toml in the current folder is read without being named."""
    toml(tmp_path / CONFIG_FILE_DEFAULT, 'host = "0.0.0.0"\n')
    resolved = load({}, {})
    assert resolved.settings.host == "0.0.0.0"
    assert resolved.sources["host"] == CONFIG_FILE_DEFAULT


def test_the_environment_can_name_a_file(tmp_path: Path) -> None:
    """KVSTREAMS_CONFIG replaces the file in the current folder, and --config replaces both."""
    toml(tmp_path / CONFIG_FILE_DEFAULT, "port = 1\n")
    named = toml(tmp_path / "named.toml", "port = 2\n")
    given_file = toml(tmp_path / "given.toml", "port = 3\n")
    environ = {"KVSTREAMS_CONFIG": str(named)}
    assert load({}, environ).settings.port == 2
    assert load({}, environ, given_file).settings.port == 3


@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_file_that_is_named_must_exist(by: str, tmp_path: Path) -> None:
    """A missing file is an error if an option or the environment names it, and the error contains the name."""
    missing = tmp_path / "missing.toml"
    with pytest.raises(SettingsError, match=r"missing\.toml does not exist"):
        load({}, {"KVSTREAMS_CONFIG": str(missing)} if by == "environment" else {}, missing if by == "option" else None)


@pytest.mark.parametrize(
    "content",
    [b"port = ", b"port = 1\nport = 2", b"\xff\xfe\x00", b'host = "\xff"', b"port = " + b"9" * 5000],
    ids=["cut off", "twice", "utf-16", "latin-1", "5000 digits"],
)
def test_the_error_for_an_invalid_file_names_it(content: bytes, tmp_path: Path) -> None:
    """A file that is not valid TOML is refused with its name, whatever is wrong with it."""
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(SettingsError, match=r"bad\.toml cannot be read"):
        load({}, {}, tmp_path / "bad.toml")


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    """The error says that the folder cannot be read."""
    with pytest.raises(SettingsError, match="cannot be read"):
        load({}, {}, tmp_path)


def test_an_unknown_setting_in_a_file_is_refused(tmp_path: Path) -> None:
    """The error has the unknown name, the file, and the command that prints all settings."""
    file = toml(tmp_path / "a.toml", "prot = 1\n")
    with pytest.raises(SettingsError, match=r"prot in .*a\.toml is not a setting.*kvstreams config"):
        load({}, {}, file)


def test_other_variables_are_ignored() -> None:
    """KVSTREAMS_ variables of other parts, and variables without the prefix, change nothing."""
    environ = {"KVSTREAMS_TEST_KAFKA": "x:1", "PORT": "1", "KVSTREAMS_": "x", "kvstreams_port": "1"}
    assert load({}, environ).settings == Settings()


WRONG: list[tuple[str, str, str]] = [
    ("port", "x", "not a whole number"),
    ("port", "", "not a whole number"),
    ("port", "80.5", "not a whole number"),
    ("port", "-1", "at least 0"),
    ("port", "65536", "at most 65535"),
    ("block_size", "0", "at least 1"),
    ("retention_ms", "9223372036854775808", "at most 9223372036854775807"),
    ("router", "maybe", "not on or off"),
    ("log_json", "2", "not on or off"),
    ("router_mode", "best", "not one of kv, round-robin, random"),
    ("router_temperature", "nan", "at least 0"),
    ("router_temperature", "inf", "at most"),
    ("kv_overlap_score_weight", "-0.1", "at least 0"),
    ("kv_overlap_score_weight", "1e308", "at most"),
    ("tier_weights", "1,2,3", "4 numbers"),
    ("tier_weights", "1,1,1,-1", "4 numbers"),
    ("tier_weights", "1,1,1,nan", "4 numbers"),
    ("tier_weights", "1,1,1,inf", "4 numbers"),
    ("tier_weights", "1,1,1,x", "numbers separated by commas"),
    ("model_block_sizes", "llama", "whole numbers by name"),
    ("model_block_sizes", "llama=x", "whole numbers by name"),
    ("model_block_sizes", "llama=0", "at least 1"),
    ("model_block_sizes", "llama=4097", "at most 4096"),
    ("pool_class_load_gb_per_s", "fs=fast", "numbers by name"),
    ("pool_class_load_gb_per_s", "fs=-1", "at least 0"),
    ("pool_class_load_gb_per_s", "fs=inf", "at most 1000000"),
    ("pool_class_load_gb_per_s", "fs=nan", "at least 0"),
    ("model_block_sizes", '{"llama": 1', "whole numbers by name"),
    ("model_block_sizes", '{"llama": "x"}', "whole numbers by name"),
    ("schema_ids", "kv-events=", "whole numbers by name"),
    ("kafka_properties", '{"linger.ms": 5}', "texts by name"),
    *[
        ("kafka_properties", f"{name}=x", f"kafka_properties has '{name}'")
        for name in ("bootstrap.servers", "ssl.ca.location", "sasl.password", "acks", "isolation.level", "client.rack")
    ],
    ("kafka_security", "tls", "not one of plaintext, ssl, sasl_plaintext, sasl_ssl"),
    ("kafka_sasl_mechanism", "SCRAM", "not one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER"),
    ("log_level", "loud", "one of debug, info, warning, error"),
    ("kafka", " ", "empty"),
    ("topic_prefix", "a/b", "topic_prefix is 'a/b'"),
    ("topic_prefix", "ü", "topic_prefix is 'ü'"),
    ("topic_prefix", "a\n", "topic_prefix is"),
    ("topic_prefix", "x" * 201, "at most 200"),
]


@pytest.mark.parametrize("source", ["command line", "environment", "file"])
@pytest.mark.parametrize(("setting", "value", "reason"), WRONG)
def test_the_error_for_a_wrong_value_names_the_setting_and_its_source(
    setting: str, value: str, reason: str, source: str, tmp_path: Path
) -> None:
    """One error has the setting, what is wrong with its value, and where the value came from, for every source."""
    overrides: dict[str, Any] = {}
    environ: dict[str, str] = {}
    file = None
    if source == "command line":
        overrides, came_from = {setting: value}, "command line"
    elif source == "environment":
        environ, came_from = {f"KVSTREAMS_{setting.upper()}": value}, f"KVSTREAMS_{setting.upper()}"
    else:
        quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        file = toml(tmp_path / "w.toml", f'{setting} = "{quoted}"\n')
        came_from = str(file)
    with pytest.raises(SettingsError) as caught:
        load(overrides, environ, file)
    text = str(caught.value)
    assert text.startswith(setting)
    assert reason in text
    assert text.endswith(f"It came from: {came_from}")


@pytest.mark.parametrize(
    "line",
    ["port = true", "port = [1]", "kafka = 1", "router = 1.5", "tier_weights = 1", "log_level = []", "port = {}"],
)
def test_a_value_of_another_type_in_a_file_is_refused(line: str, tmp_path: Path) -> None:
    """A TOML value of a wrong type is refused, and the error names the setting and the file."""
    with pytest.raises(SettingsError, match=f"^{line.split(' ')[0]} is .*It came from: .*t.toml$"):
        load({}, {}, toml(tmp_path / "t.toml", line))


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_a_secret_is_shown_nowhere(name: str, tmp_path: Path) -> None:
    """Neither the text of the settings nor an error about the value contains it."""
    settings = load({}, {f"KVSTREAMS_{name.upper()}": "sesame"}).settings
    assert getattr(settings, name) == "sesame"
    assert "sesame" not in repr(settings)
    assert shown_value(settings, name) == "set, not shown"
    assert shown_value(Settings(), name) == ""
    with pytest.raises(SettingsError, match=f"^{name} is not text. It came from: ") as caught:
        load({}, {}, toml(tmp_path / "t.toml", f"{name} = 4711"))
    assert "4711" not in str(caught.value)
    assert caught.value.__cause__ is None


def just_outside(value: float, away: int) -> float:
    return value + away * (1 if isinstance(value, int) else max(1e-9, abs(value) * 1e-9))


@pytest.mark.parametrize("setting", RANGES)
def test_a_range_includes_its_bounds_and_nothing_beyond(setting: str) -> None:
    """The lowest and the highest value are accepted, and the next values outside are refused."""
    low, high = RANGES[setting]
    for inside in (low, high):
        resolved = load({setting: inside}, {})
        assert getattr(resolved.settings, setting) == inside
    for outside in (just_outside(low, -1), just_outside(high, 1)):
        with pytest.raises(SettingsError, match=f"^{setting} is "):
            load({setting: outside}, {})


def test_every_number_has_a_range_that_is_tested() -> None:
    """Every setting that is a number is in RANGES."""
    numbers = {setting.name for setting in fields(Settings) if type(getattr(Settings(), setting.name)) in (int, float)}
    assert numbers == set(RANGES)


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        ("model_block_sizes", "llama=64,qwen=16", {"llama": 64, "qwen": 16}),
        ("model_block_sizes", " llama = 64 , ", {"llama": 64}),
        ("model_block_sizes", '{"a,b=c": 64}', {"a,b=c": 64}),
        ("model_block_sizes", "", {}),
        ("schema_ids", "kv-events=12", {"kv-events": 12}),
        ("pool_class_load_gb_per_s", "devdax=20,fs=2.5", {"devdax": 20.0, "fs": 2.5}),
        ("kafka_properties", "linger.ms=5, debug=fetch", {"linger.ms": "5", "debug": "fetch"}),
        ("kafka_properties", '{"debug": "fetch,topic"}', {"debug": "fetch,topic"}),
        ("tier_weights", "1, 0.5,0.25 ,0", (1.0, 0.5, 0.25, 0.0)),
        *[("router_mode", str(mode), mode) for mode in RouterMode],
        ("topic_prefix", "", ""),
        ("port", "0", 0),
        ("booking_ttl_s", "1.5", 1.5),
        *[("router", text, True) for text in ("on", "true", "1", "yes", "ON")],
        *[("router", text, False) for text in ("off", "false", "0", "no", "False")],
    ],
)
def test_every_kind_of_setting_is_read_from_the_environment(setting: str, text: str, value: Any) -> None:
    """Dicts, tuples, switches and choices have a form for environment variables."""
    resolved = load({}, {f"KVSTREAMS_{setting.upper()}": text})
    assert getattr(resolved.settings, setting) == value
    assert resolved.sources[setting] == f"KVSTREAMS_{setting.upper()}"


def test_a_file_uses_toml_tables_and_lists(tmp_path: Path) -> None:
    """Dicts are tables and tuples are lists in TOML."""
    text = "tier_weights = [1, 0.5, 0.25, 0]\nrouter = false\n[model_block_sizes]\nllama = 64\n"
    settings = load({}, {}, toml(tmp_path / "t.toml", text)).settings
    assert settings.tier_weights == (1.0, 0.5, 0.25, 0.0)
    assert settings.model_block_sizes == {"llama": 64}
    assert settings.router is False


def test_block_size_of_a_model() -> None:
    """A model in `model_block_sizes` has its own block size; all others have `block_size`."""
    settings = Settings(block_size=16, model_block_sizes={"llama": 64})
    assert settings.block_size_of("llama") == 64
    assert settings.block_size_of("qwen") == 16


#: What an environment variable can hold.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def _numbers(setting: str) -> st.SearchStrategy[Any]:
    low, high = RANGES[setting]
    if isinstance(low, float):
        return st.floats(low, high)
    return st.integers(int(low), int(high))


#: Values of every setting that is neither a number nor a switch.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "kafka": TEXT.filter(str.strip),
    "topic_prefix": st.text(string.ascii_letters + string.digits + "._-", max_size=200),
    "data_dir": TEXT,
    "model_block_sizes": st.dictionaries(TEXT, st.integers(1, 4096)),
    "schema_ids": st.dictionaries(TEXT, st.integers(0, 1 << 31)),
    "kafka_properties": st.dictionaries(TEXT.map("x{}".format), TEXT),
    "lmcache_models": st.dictionaries(TEXT, TEXT),
    "pool_class_load_gb_per_s": st.dictionaries(TEXT, st.floats(0.0, WEIGHT_MAX)),
    **dict.fromkeys(("kafka_oauth_provider", "router_rack"), TEXT),
    "host": TEXT,
    **dict.fromkeys(
        (
            *("kafka_tls_ca", "kafka_tls_certificate", "kafka_tls_key", "kafka_sasl_username"),
            *("kafka_sasl_password", "kafka_sasl_password_file", "kafka_oauth_token_file", "kafka_oidc_token_url"),
            *("kafka_oidc_client_id", "kafka_oidc_client_secret", "kafka_oidc_client_secret_file", "kafka_oidc_scope"),
            *("tokens_file", "tls_certificate", "tls_key", "tls_client_ca", "decision_log_salt"),
        ),
        TEXT,
    ),
    "kafka_security": st.sampled_from(KafkaSecurity),
    "kafka_sasl_mechanism": st.sampled_from(SaslMechanism),
    "router_mode": st.sampled_from(RouterMode),
    "router_policy": TEXT,
    "kv_load_gb_per_s": st.tuples(*[st.floats(0.0, WEIGHT_MAX)] * 3),
    "router_queue_policy": st.sampled_from(QueuePolicy),
    "front_kv_transfer": st.sampled_from(KvTransfer),
    "topic_profile": st.sampled_from(TopicProfile),
    "front_cors_origins": TEXT,
    "gateway_access_log": TEXT,
    "picker_objectives": st.lists(st.sampled_from(["a=1", "b = -2"])).map(",".join),
    "models": st.lists(st.sampled_from(["llama", "org/qwen"])).map(",".join),
    "session_fields": st.lists(st.sampled_from(SESSION_FIELDS)).map(",".join),
    "body_priority": st.sampled_from(BodyPriority),
    "tier_weights": st.tuples(*[st.floats(0.0, WEIGHT_MAX)] * 4),
    "log_level": st.sampled_from(["debug", "info", "warning", "error"]),
}
SWITCHES = [setting for setting in SETTINGS if isinstance(getattr(Settings(), setting), bool)]

ANY_SETTINGS = st.builds(
    Settings,
    **VALUES,
    **{switch: st.booleans() for switch in SWITCHES},
    **{setting: _numbers(setting) for setting in RANGES},
)


def test_every_setting_has_values_to_test_with() -> None:
    """A setting is in RANGES, in VALUES, or is a switch, so that the tests with generated settings vary it."""
    assert sorted([*VALUES, *SWITCHES, *RANGES]) == sorted(SETTINGS)


@given(ANY_SETTINGS)
@hypothesis_settings(deadline=None, max_examples=100)
def test_settings_reach_a_child_process_unchanged(settings: Settings) -> None:
    """A child process that loads its settings from the environment has the same ones as its parent."""
    assert load({}, as_environ(settings)).settings == settings


def test_a_child_process_ignores_other_sources(tmp_path: Path) -> None:
    """A setting at its default keeps it in a child whose environment or folder has another value."""
    toml(tmp_path / CONFIG_FILE_DEFAULT, "port = 1\n")
    inherited = {"KVSTREAMS_PARTITIONS": "2", "KVSTREAMS_KAFKA": "elsewhere:1"}
    assert load({}, inherited | as_environ(Settings())).settings == Settings()


@pytest.mark.parametrize("setting", UNNEEDED_OPTIONS)
@pytest.mark.parametrize("source", ["command line", "environment", "file"])
def test_unneeded_options_of_dynamo_are_accepted_with_a_warning(setting: str, source: str, tmp_path: Path) -> None:
    """Every source accepts them with any value; the warning has the reason, and child processes do not get them."""
    overrides = {setting: "5"} if source == "command line" else {}
    environ = {f"KVSTREAMS_{setting.upper()}": "5"} if source == "environment" else {}
    file = toml(tmp_path / "n.toml", f"{setting} = 5\n") if source == "file" else None
    resolved = load(overrides, environ, file)
    assert resolved.settings == Settings()
    (warning,) = resolved.warnings
    assert warning.startswith(f"{setting} (from: ")
    assert warning.endswith(UNNEEDED_OPTIONS[setting])
    assert load(dict.fromkeys(UNNEEDED_OPTIONS), {}).warnings == ()
    assert f"KVSTREAMS_{setting.upper()}" not in as_environ(resolved.settings)


@pytest.mark.parametrize(
    ("changes", "reads"),
    [
        ({}, True),
        ({"kv_overlap_score_weight": 0.5}, True),
        ({"kv_overlap_score_weight": 0.0}, False),
        ({"kv_events": False}, False),
    ],
)
def test_the_index_is_read_only_if_it_is_used(changes: dict[str, Any], reads: bool) -> None:
    """The index is not read if overlap has no weight, or if cached blocks are predicted."""
    assert Settings(**changes).reads_index is reads


def test_settings_are_frozen() -> None:
    """A setting cannot be changed in place; `replace` returns a new object, and checks it."""
    settings = Settings()
    with pytest.raises(FrozenInstanceError):
        settings.port = 1  # type: ignore[misc]
    assert replace(settings, port=1).port == 1
    with pytest.raises(SettingsError):
        replace(settings, port=-1)


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        ({"router_reset_states": False, "kv_events": False}, "kv_events is off"),
        ({"router_reset_states": False, "kv_overlap_score_weight": 0.0}, "kv_overlap_score_weight is 0"),
        ({"router_reset_states": True, "kv_events": False}, None),
        ({"router_reset_states": False}, None),
        ({"kv_events": False}, None),
    ],
)
def test_persistence_without_an_index_gives_a_warning(given: dict[str, Any], warns: str | None) -> None:
    """An explicit router_reset_states=False without an index gives a warning, because nothing persists."""
    warnings = load(given, {}).warnings
    assert [warns in warning for warning in warnings] == [True] if warns else not warnings


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, RouterMode.EXPECTED_TIME),
        ({"router_temperature": 0.0}, RouterMode.KV),
        ({"kv_overlap_score_weight": 1.0}, RouterMode.KV),
        ({"kv_overlap_score_credit": 2.0}, RouterMode.KV),
        ({"decode_active_request_weight": 64.0}, RouterMode.KV),
        ({"kv_overlap_score_weight": 2.0, "router_mode": RouterMode.EXPECTED_TIME}, RouterMode.EXPECTED_TIME),
    ],
)
def test_a_value_of_mode_kv_alone_selects_it(given: dict[str, Any], mode: RouterMode) -> None:
    """A router that sets a value that only kv has, and no mode, decides by kv, also if the value is the default."""
    resolved = load(given, environ={})
    assert resolved.settings.router_mode is mode
    if given and "router_mode" not in given:
        assert resolved.sources["router_mode"] == f"{next(iter(given))} is set, which only kv has"


def takers_of_all_settings(node: ast.AST, name: str = "") -> Iterator[str]:
    """Give the parameters, and the fields of classes, whose type names Settings, below a node and with its name."""
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{name}.{child.name}".lstrip(".")
        elif isinstance(child, ast.arg) and names_settings(child.annotation):
            yield f"{name}({child.arg})"
        elif isinstance(child, ast.AnnAssign) and isinstance(node, ast.ClassDef) and names_settings(child.annotation):
            yield f"{name}.{ast.unparse(child.target)}"
        yield from takers_of_all_settings(child, inner)


def names_settings(annotation: ast.expr | None) -> bool:
    """Return whether an annotation has the class Settings in it, also as an attribute of its module."""
    nodes = [] if annotation is None else ast.walk(annotation)
    return any("Settings" in (getattr(node, "id", ""), getattr(node, "attr", "")) for node in nodes)


def test_takers_of_all_settings_are_recognised() -> None:
    """Parameters and fields count in every form of the annotation; groups, variables and results do not."""
    source = """
def first(a: Settings, b: Settings | None = None, *c: settings.Settings, d: RouterSettings) -> Settings:
    local: Settings = a
class Second:
    field: Settings | None
    other: ScopeSettings
    async def third(self, given: list[Settings]): ...
"""
    takers = ["first(a)", "first(b)", "first(c)", "Second.field", "Second.third(given)"]
    assert sorted(takers_of_all_settings(ast.parse(source))) == sorted(takers)


def test_components_take_the_group_that_they_read() -> None:
    """A signature shows which settings a component depends on: only what hands all of them on takes all."""
    package = ROOT / "streams"
    takers = {
        f"{path.relative_to(package)}: {taker}"
        for path in package.rglob("*.py")
        for taker in takers_of_all_settings(ast.parse(path.read_text()))
    }
    assert takers == TAKES_ALL_SETTINGS
