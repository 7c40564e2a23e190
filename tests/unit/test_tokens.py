"""The file of bearer tokens: what it may contain, what each error says, and what a token then allows."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.errors import Forbidden, SettingsError, Unauthorized
from streams.security import tokens as tokens_module
from streams.security.access import ANY_RIGHT, granted
from streams.security.files import SECRET_BYTES_MAX, Watched, read_secret, read_text
from streams.security.tokens import (
    PRIORITY_MAX,
    TENANT_CHARS_MAX,
    TOKEN_CHARS_MIN,
    BearerTokens,
    Grant,
    Right,
    parse_tokens,
)

SECRET = "sesame-open-0123456789"
OTHER = "another-token-9876543210"


def parse(text: str) -> BearerTokens:
    return parse_tokens([("tokens.toml", text)])


def one(body: str, name: str = "gateway") -> str:
    return f'[{name}]\ntoken = "{SECRET}"\n{body}\n'


def test_a_token_carries_its_rights_tenant_and_priority() -> None:
    """Each table is one token, and a token without a tenant or a priority sets none."""
    tokens = parse(
        f'[gateway]\ntoken = "{SECRET}"\nrights = ["route", "read"]\n'
        f'[team-a]\ntoken = "{OTHER}"\nrights = ["generate"]\ntenant = "team a"\npriority_max = 5\n'
    )
    assert len(tokens) == 2
    assert tokens.grant_of(SECRET) == Grant("gateway", frozenset({Right.ROUTE, Right.READ}))
    assert tokens.grant_of(OTHER) == Grant("team-a", frozenset({Right.GENERATE}), "team a", 5)
    assert tokens.grant_of(SECRET + "0") is None


def test_a_tokens_tenant_counts_and_no_other_one_may_be_named() -> None:
    """A token with a tenant acts for this one only; one without acts for the tenant that the request names."""
    gateway, team = Grant("gateway", frozenset(Right)), Grant("team-a", frozenset(Right), "team a")
    assert [gateway.tenant_of(named) for named in ("", "b")] == ["", "b"]
    assert [team.tenant_of(named) for named in ("", "team a")] == ["team a", "team a"]
    with pytest.raises(Forbidden, match="another tenant") as caught:
        team.tenant_of("b")
    assert "b" not in str(caught.value).split()  # the message quotes nothing of the request


@pytest.mark.parametrize(
    ("priority_max", "asked", "given"),
    [(None, PRIORITY_MAX, PRIORITY_MAX), (5, 6, 5), (5, 5, 5), (5, -7, -7), (0, 1, 0)],
)
def test_a_priority_is_at_most_that_of_its_token(priority_max: int | None, asked: int, given: int) -> None:
    """A request that asks for more gets the token's maximum; smaller ones stay."""
    assert Grant("any", frozenset(), None, priority_max).priority_of(asked) == given


def test_a_file_may_contain_digests_instead_of_tokens() -> None:
    """A token is known by its SHA-256, as `sha256sum` prints it."""
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    tokens = parse(f'[gateway]\nsha256 = "{digest}"\nrights = ["read"]\n')
    assert tokens.grant_of(SECRET) is not None
    assert tokens.grant_of(digest) is None


def test_tokens_of_several_files_are_known_together() -> None:
    """Each file adds its tokens."""
    first, second = one('rights = ["read"]'), f'[b]\ntoken = "{OTHER}"\nrights = ["route"]\n'
    tokens = parse_tokens([("a.toml", first), ("b.toml", second)])
    assert [tokens.grant_of(each) is not None for each in (SECRET, OTHER)] == [True, True]


WRONG = {
    "not TOML": (f'[gateway]\ntoken = "{SECRET}\n', r"tokens.toml is not TOML: .*line 2"),
    "no table": (f'gateway = "{SECRET}"', r"\[gateway\] is not a table"),
    "unknown key": (one('rights = ["read"]\nright = 1'), "unknown key, 'right'. The keys are priority_max, rights"),
    "no token": ('[gateway]\nrights = ["read"]', "needs either token or sha256, and not both"),
    "token and digest": (one(f'rights = ["read"]\nsha256 = "{"0" * 64}"'), "either token or sha256"),
    "digest in upper case": (f'[gateway]\nsha256 = "{"A" * 64}"\nrights = ["read"]', "64 hexadecimal digits"),
    "short": (f'[gateway]\ntoken = "{"x" * (TOKEN_CHARS_MIN - 1)}"\nrights = ["read"]', "fewer than 20 characters"),
    "not text": ('[gateway]\ntoken = 12345678901234567890\nrights = ["read"]', "fewer than 20 characters"),
    "a space": (f'[gateway]\ntoken = "{SECRET} x"\nrights = ["read"]', "a character that a bearer token cannot have"),
    "no rights": (one(""), r"\[gateway\]: rights is not a list of rights. The rights are route, read, operate, gen"),
    "empty rights": (one("rights = []"), "rights is not a list of rights"),
    "rights as text": (one('rights = "read"'), "rights is not a list of rights"),
    "unknown right": (one('rights = ["write"]'), "'write' is not a right"),
    "right of another type": (one("rights = [1]"), "1 is not a right"),
    "empty tenant": (one('rights = ["read"]\ntenant = ""'), "tenant is not 1 to 128"),
    "tenant with a line break": (one('rights = ["read"]\ntenant = "a\\nb"'), "printable"),
    "long tenant": (one(f'rights = ["read"]\ntenant = "{"x" * (TENANT_CHARS_MAX + 1)}"'), "tenant is not 1 to 128"),
    "negative priority": (one('rights = ["read"]\npriority_max = -1'), "whole number from 0 to"),
    "great priority": (one(f'rights = ["read"]\npriority_max = {PRIORITY_MAX + 1}'), "whole number from 0 to"),
    "switch as priority": (one('rights = ["read"]\npriority_max = true'), "whole number from 0 to"),
    "twice": (one('rights = ["read"]') + one('rights = ["read"]', "b"), r"\[b\] has the same token as \[gateway\]"),
    "empty": ("# nothing\n", "contain no token"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_names_the_place_and_shows_no_token(case: str) -> None:
    """Each mistake is refused with the file, the table and the field, and neither it nor its causes hold a token."""
    text, reason = WRONG[case]
    with pytest.raises(SettingsError, match=reason) as caught:
        parse(text)
    shown = "".join(f"{each!r} {vars(each)}" for each in (caught.value, caught.value.__cause__) if each is not None)
    assert SECRET not in shown


def test_there_is_a_limit_to_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is accepted, and one more is refused."""
    monkeypatch.setattr(tokens_module, "TOKENS_MAX", 3)
    tables = [f'[n{number}]\ntoken = "{SECRET}{number}"\nrights = ["read"]\n' for number in range(4)]
    assert len(parse("".join(tables[:3]))) == 3
    with pytest.raises(SettingsError, match="more than 3 tokens"):
        parse("".join(tables))


@given(st.text(max_size=200))
def test_any_text_is_a_file_of_tokens_or_an_error_of_ours(text: str) -> None:
    """No text makes the parser fail in another way."""
    try:
        parse(text)
    except SettingsError:
        pass


@pytest.mark.parametrize(
    ("header", "right", "allowed"),
    [
        (f"Bearer {SECRET}", Right.READ, True),
        (f"bearer  {SECRET} ", Right.READ, True),
        (f"Bearer {SECRET}", ANY_RIGHT, True),
        (f"Bearer {SECRET}", Right.OPERATE, Forbidden),
        (f"Bearer {OTHER}", Right.READ, Unauthorized),
        (f"Basic {SECRET}", Right.READ, Unauthorized),
        (SECRET, Right.READ, Unauthorized),
        ("Bearer", Right.READ, Unauthorized),
        ("Bearer \udcff\udcfe", Right.READ, Unauthorized),
        ("", Right.READ, Unauthorized),
        (None, Right.READ, Unauthorized),
        (None, ANY_RIGHT, Unauthorized),
    ],
)
def test_a_header_is_granted_what_its_token_allows(
    header: str | None, right: str, allowed: bool | type[Exception]
) -> None:
    """401 without a known token, 403 with a token that lacks the right."""
    tokens = parse(one('rights = ["read"]'))
    if isinstance(allowed, bool):
        assert granted(tokens, header, right).name == "gateway"
        return
    with pytest.raises(allowed) as caught:
        granted(tokens, header, right)
    assert SECRET not in str(caught.value)


def test_a_changed_file_is_loaded_again_and_a_broken_one_keeps_the_old_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A change counts at the next check; a file that cannot be used, or that is gone, is logged once."""
    file = tmp_path / "tokens.toml"
    file.write_text(one('rights = ["read"]'))
    watched = Watched(
        "the tokens", [str(file)], lambda: parse_tokens([("f", read_text("tokens_file", str(file), 999))])
    )
    assert not watched.check()

    file.write_text(one('rights = ["route"]'))
    assert watched.check()
    grant = watched.value.grant_of(SECRET)
    assert grant is not None and grant.rights == {Right.ROUTE}

    with caplog.at_level(logging.ERROR):
        for change in (lambda: file.write_text("[broken"), file.unlink):
            change()
            assert not watched.check()
            assert not watched.check()
            assert watched.value.grant_of(SECRET) == grant
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "the tokens stay as they were, since their files cannot be used"
    ] * 2
    assert SECRET not in caplog.text

    file.write_text(one('rights = ["operate"]'))
    assert watched.check()


def test_a_link_that_leads_to_another_file_counts_as_a_change(tmp_path: Path) -> None:
    """Kubernetes replaces a mounted secret in this way; size and time may be those of the old file."""
    for name, right in (("old", "read"), ("new", "rout")):
        (tmp_path / name).write_text(right)
        os.utime(tmp_path / name, (1, 1))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "old")
    watched = Watched("it", [str(link)], lambda: read_text("x", str(link), 10))
    (tmp_path / "next").symlink_to(tmp_path / "new")
    (tmp_path / "next").replace(link)
    assert watched.check()
    assert watched.value == "rout"


def test_a_file_with_a_secret_is_read_without_the_line_break_at_its_end(tmp_path: Path) -> None:
    """Editors and `echo` add a line break, which no password has."""
    file = tmp_path / "password"
    file.write_text(f" {SECRET}\n")
    assert read_secret("kafka_sasl_password_file", str(file)) == SECRET


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"\n", "is empty"),
        (SECRET.encode() + b"\xff", "is not UTF-8"),
        (SECRET.encode() * (SECRET_BYTES_MAX // 20), "has more than 65536 bytes"),
    ],
)
def test_the_error_for_a_file_with_a_secret_names_the_setting_and_not_the_content(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    """Neither the message nor a cause contains what is in the file."""
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=f"kafka_sasl_password_file: .*password.*{reason}") as caught:
        read_secret("kafka_sasl_password_file", str(file))
    assert SECRET not in f"{caught.value!r}{caught.value.__cause__!r}"
