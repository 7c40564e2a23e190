"""Every knob: where its value comes from, what is refused, and how it reaches a child process."""

from __future__ import annotations

import string
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from streams.core.routing.selection import RouterMode
from streams.errors import SettingsError
from streams.settings import CONFIG_FILE_DEFAULT, NUMBER_MAX, UNNEEDED_OPTIONS, WEIGHT_MAX, Settings, as_environ, load

KNOBS = [knob.name for knob in fields(Settings)]

#: Every knob with a range: its lowest value, and its highest where it has one of its own.
RANGES: dict[str, tuple[float, float]] = {
    "partitions": (1, 1024),
    "replication": (1, 7),
    "block_size": (1, 4096),
    "port": (0, 65535),
    "metrics_port": (0, 65535),
    "kv_overlap_score_weight": (0.0, WEIGHT_MAX),
    "router_temperature": (0.0, WEIGHT_MAX),
    "router_seed": (0, NUMBER_MAX),
    "encoder_cuda_to_cpu_ratio": (0.001, WEIGHT_MAX),
    "router_ttl_s": (0.01, 86_400.0),
    "router_predicted_ttl_s": (0.0, 86_400.0),
    "active_decode_blocks_threshold": (0.0, 100.0),
    "active_prefill_tokens_threshold": (0, NUMBER_MAX),
    "router_min_initial_workers": (0, 1_000_000),
    "router_session_affinity_ttl_s": (0.0, 31_536_000.0),
    "router_event_threads": (1, 64),
    "cxl_score_weight": (0.0, WEIGHT_MAX),
    "moe_score_weight": (0.0, WEIGHT_MAX),
    "booking_ttl_s": (1.0, 30 * 86_400.0),
    "request_tokens_max": (1, NUMBER_MAX),
    "body_bytes_max": (1024, NUMBER_MAX),
    "stale_after_ms": (100, NUMBER_MAX),
    "behind_after_ms": (10, NUMBER_MAX),
    "worker_grace_s": (1.0, 30 * 86_400.0),
    "clear_degraded_after_s": (0.0, 30 * 86_400.0),
    "session_timeout_s": (1.0, 1800.0),
    "transaction_timeout_ms": (1000, NUMBER_MAX),
    "batch_records_max": (1, NUMBER_MAX),
    "queue_records_high": (1, NUMBER_MAX),
    "queue_bytes_high": (1, NUMBER_MAX),
    "rocksdb_cache_mb": (1, NUMBER_MAX),
    "retention_ms": (60_000, NUMBER_MAX),
    "cxl_evicted_ttl_s": (1.0, 30 * 86_400.0),
    "bridge_lease_s": (0.3, 600.0),
    "metrics_interval_s": (0.0, 180.0),
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's kvstreams.toml is in the current folder."""
    monkeypatch.chdir(tmp_path)


def toml(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_knob_that_nobody_gives_has_its_default() -> None:
    """Without command line, environment and file every knob is its default and says so."""
    resolved = load({}, {})
    assert resolved.settings == Settings()
    assert dict(resolved.sources) == dict.fromkeys(KNOBS, "default")


def test_precedence_is_command_line_environment_file_default(tmp_path: Path) -> None:
    """Each source wins over those behind it, and every knob says which one it was."""
    file = toml(tmp_path / "some.toml", "port = 1\npartitions = 2\nblock_size = 3\n")
    environ = {"KVSTREAMS_PORT": "10", "KVSTREAMS_PARTITIONS": "20"}
    resolved = load({"port": 100, "partitions": None}, environ, file)
    settings = resolved.settings
    assert (settings.port, settings.partitions, settings.block_size, settings.host) == (100, 20, 3, "127.0.0.1")
    wanted = {
        "port": "command line",
        "partitions": "KVSTREAMS_PARTITIONS",
        "block_size": str(file),
    }
    assert dict(resolved.sources) == dict.fromkeys(KNOBS, "default") | wanted


def test_the_file_in_the_current_folder_is_read(tmp_path: Path) -> None:
    """kvstreams.toml is found without being named."""
    toml(tmp_path / CONFIG_FILE_DEFAULT, 'host = "0.0.0.0"\n')
    resolved = load({}, {})
    assert resolved.settings.host == "0.0.0.0"
    assert resolved.sources["host"] == CONFIG_FILE_DEFAULT


def test_the_environment_names_a_file(tmp_path: Path) -> None:
    """KVSTREAMS_CONFIG replaces the file in the current folder, and --config replaces both."""
    toml(tmp_path / CONFIG_FILE_DEFAULT, "port = 1\n")
    named = toml(tmp_path / "named.toml", "port = 2\n")
    given_file = toml(tmp_path / "given.toml", "port = 3\n")
    environ = {"KVSTREAMS_CONFIG": str(named)}
    assert load({}, environ).settings.port == 2
    assert load({}, environ, given_file).settings.port == 3


@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_file_that_is_named_must_be_there(by: str, tmp_path: Path) -> None:
    """A missing file is an error only where somebody named it, and the error names it."""
    missing = tmp_path / "missing.toml"
    with pytest.raises(SettingsError, match=r"missing\.toml is not there"):
        load({}, {"KVSTREAMS_CONFIG": str(missing)} if by == "environment" else {}, missing if by == "option" else None)


@pytest.mark.parametrize(
    "content",
    [b"port = ", b"port = 1\nport = 2", b"\xff\xfe\x00", b'host = "\xff"', b"port = " + b"9" * 5000],
    ids=["cut off", "twice", "utf-16", "latin-1", "5000 digits"],
)
def test_a_file_that_is_not_toml_is_named(content: bytes, tmp_path: Path) -> None:
    """Bytes that are no TOML are refused with the file's name, whatever is wrong with them."""
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(SettingsError, match=r"bad\.toml cannot be read"):
        load({}, {}, tmp_path / "bad.toml")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """A folder in place of the file is refused by name."""
    with pytest.raises(SettingsError, match="cannot be read"):
        load({}, {}, tmp_path)


def test_an_unknown_knob_in_a_file_is_refused(tmp_path: Path) -> None:
    """A knob that does not exist is named, with the file and where the right names stand."""
    file = toml(tmp_path / "a.toml", "prot = 1\n")
    with pytest.raises(SettingsError, match=r"prot in .*a\.toml is no knob.*kvstreams config"):
        load({}, {}, file)


def test_other_variables_are_not_ours() -> None:
    """KVSTREAMS_ variables of other parts, and other people's PORT, change nothing."""
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
    ("model_block_sizes", '{"llama": 1', "whole numbers by name"),
    ("model_block_sizes", '{"llama": "x"}', "whole numbers by name"),
    ("schema_ids", "kv-events=", "whole numbers by name"),
    ("log_level", "loud", "one of debug, info, warning, error"),
    ("kafka", " ", "empty"),
    ("topic_prefix", "a/b", "topic_prefix is 'a/b'"),
    ("topic_prefix", "ü", "topic_prefix is 'ü'"),
    ("topic_prefix", "a\n", "topic_prefix is"),
    ("topic_prefix", "x" * 201, "at most 200"),
]


@pytest.mark.parametrize("source", ["command line", "environment", "file"])
@pytest.mark.parametrize(("knob", "value", "reason"), WRONG)
def test_a_wrong_value_names_the_knob_and_its_source(
    knob: str, value: str, reason: str, source: str, tmp_path: Path
) -> None:
    """What is wrong, with which knob, and where it came from, stand in one error, whatever the source."""
    overrides: dict[str, Any] = {}
    environ: dict[str, str] = {}
    file = None
    if source == "command line":
        overrides, came_from = {knob: value}, "command line"
    elif source == "environment":
        environ, came_from = {f"KVSTREAMS_{knob.upper()}": value}, f"KVSTREAMS_{knob.upper()}"
    else:
        quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        file = toml(tmp_path / "w.toml", f'{knob} = "{quoted}"\n')
        came_from = str(file)
    with pytest.raises(SettingsError) as caught:
        load(overrides, environ, file)
    text = str(caught.value)
    assert text.startswith(knob)
    assert reason in text
    assert text.endswith(f"It came from: {came_from}")


@pytest.mark.parametrize(
    "line",
    ["port = true", "port = [1]", "kafka = 1", "router = 1.5", "tier_weights = 1", "log_level = []", "port = {}"],
)
def test_a_file_with_another_type_is_refused(line: str, tmp_path: Path) -> None:
    """TOML values of a type that the knob has not are refused by name."""
    with pytest.raises(SettingsError, match=f"^{line.split(' ')[0]} is .*It came from: .*t.toml$"):
        load({}, {}, toml(tmp_path / "t.toml", line))


def just_outside(value: float, away: int) -> float:
    return value + away * (1 if isinstance(value, int) else max(1e-9, abs(value) * 1e-9))


@pytest.mark.parametrize("knob", RANGES)
def test_a_range_includes_its_bounds_and_nothing_beyond(knob: str) -> None:
    """The lowest and the highest value are taken, the next ones outside are refused."""
    low, high = RANGES[knob]
    for inside in (low, high):
        resolved = load({knob: inside}, {})
        assert getattr(resolved.settings, knob) == inside
    for outside in (just_outside(low, -1), just_outside(high, 1)):
        with pytest.raises(SettingsError, match=f"^{knob} is "):
            load({knob: outside}, {})


def test_every_number_has_a_range_that_is_tested() -> None:
    """A new knob that is a number stands in RANGES too."""
    numbers = {knob.name for knob in fields(Settings) if type(getattr(Settings(), knob.name)) in (int, float)}
    assert numbers == set(RANGES)


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        ("model_block_sizes", "llama=64,qwen=16", {"llama": 64, "qwen": 16}),
        ("model_block_sizes", " llama = 64 , ", {"llama": 64}),
        ("model_block_sizes", '{"a,b=c": 64}', {"a,b=c": 64}),
        ("model_block_sizes", "", {}),
        ("schema_ids", "kv-events=12", {"kv-events": 12}),
        ("tier_weights", "1, 0.5,0.25 ,0", (1.0, 0.5, 0.25, 0.0)),
        *[("router_mode", str(mode), mode) for mode in RouterMode],
        ("topic_prefix", "", ""),
        ("port", "0", 0),
        ("booking_ttl_s", "1.5", 1.5),
        *[("router", text, True) for text in ("on", "true", "1", "yes", "ON")],
        *[("router", text, False) for text in ("off", "false", "0", "no", "False")],
    ],
)
def test_every_kind_of_knob_is_read_from_the_environment(knob: str, text: str, value: Any) -> None:
    """Dicts, tuples, switches and choices have a form that fits an environment variable."""
    resolved = load({}, {f"KVSTREAMS_{knob.upper()}": text})
    assert getattr(resolved.settings, knob) == value
    assert resolved.sources[knob] == f"KVSTREAMS_{knob.upper()}"


def test_a_file_has_tables_and_lists_of_its_own(tmp_path: Path) -> None:
    """Dicts are tables and tuples are lists in TOML."""
    text = "tier_weights = [1, 0.5, 0.25, 0]\nrouter = false\n[model_block_sizes]\nllama = 64\n"
    settings = load({}, {}, toml(tmp_path / "t.toml", text)).settings
    assert settings.tier_weights == (1.0, 0.5, 0.25, 0.0)
    assert settings.model_block_sizes == {"llama": 64}
    assert settings.router is False


def test_block_size_of_a_model() -> None:
    """A model that is named has its block size, every other one the common one."""
    settings = Settings(block_size=16, model_block_sizes={"llama": 64})
    assert settings.block_size_of("llama") == 64
    assert settings.block_size_of("qwen") == 16


#: What an environment variable can hold.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def _numbers(knob: str) -> st.SearchStrategy[Any]:
    low, high = RANGES[knob]
    if isinstance(low, float):
        return st.floats(low, high)
    return st.integers(int(low), int(high))


ANY_SETTINGS = st.builds(
    Settings,
    kafka=TEXT.filter(str.strip),
    topic_prefix=st.text(string.ascii_letters + string.digits + "._-", max_size=200),
    data_dir=TEXT,
    model_block_sizes=st.dictionaries(TEXT, st.integers(1, 4096)),
    schema_ids=st.dictionaries(TEXT, st.integers(0, 1 << 31)),
    router=st.booleans(),
    host=TEXT,
    router_mode=st.sampled_from(RouterMode),
    tier_weights=st.tuples(*[st.floats(0.0, WEIGHT_MAX)] * 4),
    log_level=st.sampled_from(["debug", "info", "warning", "error"]),
    log_json=st.booleans(),
    kv_events=st.booleans(),
    router_replica_sync=st.booleans(),
    track_active_blocks=st.booleans(),
    **{knob: _numbers(knob) for knob in RANGES},
)


@given(ANY_SETTINGS)
@hypothesis_settings(deadline=None, max_examples=100)
def test_settings_reach_a_child_as_they_are(settings: Settings) -> None:
    """Whatever the settings, a child that loads them from its environment has the same."""
    assert load({}, as_environ(settings)).settings == settings


def test_a_child_takes_nothing_from_around_it(tmp_path: Path) -> None:
    """A knob at its default stays so in a child whose environment or folder says otherwise."""
    toml(tmp_path / CONFIG_FILE_DEFAULT, "port = 1\n")
    inherited = {"KVSTREAMS_PARTITIONS": "2", "KVSTREAMS_KAFKA": "elsewhere:1"}
    assert load({}, inherited | as_environ(Settings())).settings == Settings()


@pytest.mark.parametrize("knob", UNNEEDED_OPTIONS)
@pytest.mark.parametrize("source", ["command line", "environment", "file"])
def test_needless_knobs_of_dynamo_are_accepted_with_a_warning(knob: str, source: str, tmp_path: Path) -> None:
    """From everywhere, whatever they are given, saying why they are needless; nothing of them is passed on."""
    overrides = {knob: "5"} if source == "command line" else {}
    environ = {f"KVSTREAMS_{knob.upper()}": "5"} if source == "environment" else {}
    file = toml(tmp_path / "n.toml", f"{knob} = 5\n") if source == "file" else None
    resolved = load(overrides, environ, file)
    assert resolved.settings == Settings()
    (warning,) = resolved.warnings
    assert warning.startswith(f"{knob} (from: ")
    assert warning.endswith(UNNEEDED_OPTIONS[knob])
    assert load(dict.fromkeys(UNNEEDED_OPTIONS), {}).warnings == ()
    assert f"KVSTREAMS_{knob.upper()}" not in as_environ(resolved.settings)


@pytest.mark.parametrize(
    ("changes", "reads"),
    [
        ({}, True),
        ({"kv_overlap_score_weight": 0.5}, True),
        ({"kv_overlap_score_weight": 0.0}, False),
        ({"kv_events": False}, False),
    ],
)
def test_the_index_is_read_where_it_is_wanted(changes: dict[str, Any], reads: bool) -> None:
    """Not where overlap has no weight, or is predicted."""
    assert Settings(**changes).reads_index is reads


def test_settings_are_frozen() -> None:
    """Nobody changes a knob behind others' backs; another value is another object, checked anew."""
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
def test_who_asks_for_persistence_without_an_index_is_warned(given: dict[str, Any], warns: str | None) -> None:
    """There is nothing of an index to persist; whoever did not ask is told nothing."""
    warnings = load(given, {}).warnings
    assert [warns in warning for warning in warnings] == [True] if warns else not warnings
