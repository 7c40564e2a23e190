"""Bearer tokens and their rights: the file that lists them, and finding the grant of a token.

What lives here: parsing, and looking tokens up. What must not: reading files (files), and HTTP (access). Tokens are
kept as SHA-256 digests only, so that no error, traceback or memory dump of a later moment contains one.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from streams.errors import Forbidden, SettingsError

#: A shorter token could be guessed. `openssl rand -hex 32` gives 64 characters.
TOKEN_CHARS_MIN = 20

#: Every process keeps all tokens in memory. A fleet with more users than this needs a proxy that authenticates them.
TOKENS_MAX = 10_000

#: TOKENS_MAX tokens with names and rights take 2 MB.
FILE_BYTES_MAX = 8 * 1024 * 1024

#: A tenant is the value of a label of metrics and a key of queues.
TENANT_CHARS_MAX = 128

#: The greatest priority that a token can allow, as in a request's field `priority`.
PRIORITY_MAX = (1 << 31) - 1

#: What RFC 6750 allows in a bearer token.
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_KEYS = frozenset({"token", "sha256", "rights", "tenant", "priority_max"})

_REMEDY = "docs/security.md shows the format of the file"


class Right(enum.StrEnum):
    """What a token allows its holder to do."""

    ROUTE = "route"  # decide, book and report
    READ = "read"  # state and metrics
    OPERATE = "operate"  # workers and pools
    GENERATE = "generate"  # use the front


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token allows. name: of its table in the file. tenant, priority_max: None where the token sets none."""

    name: str
    rights: frozenset[Right]
    tenant: str | None = None
    priority_max: int | None = None

    def tenant_of(self, named: str) -> str:
        """The tenant of a request, which names it itself or has "". Raises Forbidden if the token is another tenant's.

        A token without a tenant is that of a gateway, which acts for all of its own.
        """
        if self.tenant is None:
            return named
        if named not in ("", self.tenant):
            raise Forbidden(
                f"the token of {self.name!r} belongs to another tenant than the one that the request names",
                remedy="Leave out the header X-Tenant, or use a token without a tenant",
            )
        return self.tenant

    def priority_of(self, asked: int) -> int:
        """The priority of a request that asks for this one."""
        return asked if self.priority_max is None else min(asked, self.priority_max)


#: What every caller may do if no tokens are configured.
ANONYMOUS = Grant("", frozenset(Right))


class BearerTokens:
    """All tokens of a process. Immutable: a changed file gives another object."""

    def __init__(self, grants: Mapping[bytes, Grant]) -> None:
        """grants: by SHA-256 digest."""
        self._grants = {digest[:8]: (digest, grant) for digest, grant in grants.items()}

    def __len__(self) -> int:
        return len(self._grants)

    def grant_of(self, token: str) -> Grant | None:
        """The grant of a token, or None if it is unknown.

        Digests are compared, in constant time after a lookup by their first 8 bytes. How long the lookup takes depends
        on the digest only, and nobody can choose a token by parts of its digest without knowing the token.
        """
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        entry = self._grants.get(digest[:8])
        return entry[1] if entry is not None and hmac.compare_digest(entry[0], digest) else None


def parse_tokens(texts: Iterable[tuple[str, str]]) -> BearerTokens:
    """Tokens of several files, each a pair of its name and its text.

    Raises SettingsError, which names the file, the table and the field, and never contains a token.
    """
    grants: dict[bytes, Grant] = {}
    for file, text in texts:
        try:
            tables = tomllib.loads(text)
        except ValueError as exc:
            # Without the cause: an exception of tomllib may hold the text of the file.
            raise SettingsError(f"{file} is not TOML: {exc}", remedy=_REMEDY) from None
        for name, table in tables.items():
            digest, grant = _parse_one(f"{file}: [{name}]", name, table)
            if digest in grants:
                raise SettingsError(
                    f"{file}: [{name}] has the same token as [{grants[digest].name}]",
                    remedy="Give each name a token of its own",
                )
            grants[digest] = grant
        if len(grants) > TOKENS_MAX:
            raise SettingsError(f"{file} has more than {TOKENS_MAX} tokens")
    if not grants:
        raise SettingsError("the files of tokens_file contain no token", remedy=_REMEDY)
    return BearerTokens(grants)


def _parse_one(where: str, name: str, table: Any) -> tuple[bytes, Grant]:
    if not isinstance(table, dict):
        raise SettingsError(f"{where} is not a table with a token and its rights", remedy=_REMEDY)
    unknown = sorted(table.keys() - _KEYS)
    if unknown:
        raise SettingsError(
            f"{where} has an unknown key, {unknown[0]!r}", remedy=f"The keys are {', '.join(sorted(_KEYS))}"
        )
    return _digest_of(where, table), Grant(
        name, _rights_of(where, table.get("rights")), _tenant_of(where, table), _priority_of(where, table)
    )


def _digest_of(where: str, table: Mapping[str, Any]) -> bytes:
    token, sha256 = table.get("token"), table.get("sha256")
    if (token is None) == (sha256 is None):
        raise SettingsError(f"{where} needs either token or sha256, and not both", remedy=_REMEDY)
    if sha256 is not None:
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise SettingsError(
                f"{where}: sha256 is not 64 hexadecimal digits in lower case",
                remedy="`printf %s TOKEN | sha256sum` prints them",
            )
        return bytes.fromhex(sha256)
    if not isinstance(token, str) or len(token) < TOKEN_CHARS_MIN:
        raise SettingsError(
            f"{where}: token has fewer than {TOKEN_CHARS_MIN} characters", remedy="`openssl rand -hex 32` prints one"
        )
    if not _TOKEN.fullmatch(token):
        raise SettingsError(
            f"{where}: token has a character that a bearer token cannot have",
            remedy="Letters, digits and -._~+/ are allowed, and = at the end",
        )
    return hashlib.sha256(token.encode()).digest()


def _rights_of(where: str, rights: Any) -> frozenset[Right]:
    known = ", ".join(Right)
    if not isinstance(rights, list) or not rights:
        raise SettingsError(f"{where}: rights is not a list of rights", remedy=f"The rights are {known}")
    for right in rights:
        if right not in Right.__members__.values():
            raise SettingsError(f"{where}: {right!r} is not a right", remedy=f"The rights are {known}")
    return frozenset(map(Right, rights))


def _tenant_of(where: str, table: Mapping[str, Any]) -> str | None:
    tenant = table.get("tenant")
    if tenant is None:
        return None
    if not isinstance(tenant, str) or not 1 <= len(tenant) <= TENANT_CHARS_MAX or not tenant.isprintable():
        raise SettingsError(f"{where}: tenant is not 1 to {TENANT_CHARS_MAX} printable characters")
    return tenant


def _priority_of(where: str, table: Mapping[str, Any]) -> int | None:
    priority = table.get("priority_max")
    if priority is None:
        return None
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= PRIORITY_MAX:
        raise SettingsError(f"{where}: priority_max is not a whole number from 0 to {PRIORITY_MAX}")
    return priority
