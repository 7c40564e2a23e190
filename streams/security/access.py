"""Who may use a server: the check of every HTTP request, and of the address that a server listens on.

What lives here: the tokens and certificates of one server, the middleware that checks requests, and the refusal of an
address that is open to everyone. What must not: which call needs which right (router_api.http.calls), and sockets
(process.listener).
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from aiohttp.typedefs import Middleware

from streams.errors import Forbidden, SettingsError, Unauthorized
from streams.security.files import Watched, read_text
from streams.security.self_signed import self_signed_context
from streams.security.tls import server_context
from streams.security.tokens import ANONYMOUS, FILE_BYTES_MAX, BearerTokens, Grant, Right, parse_tokens
from streams.settings import AccessSettings

log = logging.getLogger(__name__)

#: Interval at which the files are checked for changes.
CHECK_S = 1.0

#: Names of protocols in TLS (ALPN).
HTTP_1, HTTP_2 = "http/1.1", "h2"

#: Where the middleware leaves the grant of a request.
_GRANT = web.RequestKey("grant", Grant)

#: The right of a path that does not exist: any known token may learn that.
ANY_RIGHT = "any"

#: The right that a request needs, ANY_RIGHT, or None if it needs no token.
RightOf = Callable[[web.Request], str | None]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class CertificateAccess:
    """The certificates of one server, and who may connect to it: without tokens, the owners of client certificates.

    Files are read by `check`; connections use what was read last.
    """

    def __init__(
        self, settings: AccessSettings | None = None, protocol: str = HTTP_1, *, self_signed: bool = False
    ) -> None:
        """Without settings: no TLS, for loopback only. protocol: what clients must speak over TLS, as ALPN names it.

        self_signed: use a certificate of its own if the settings name none. Raises SettingsError for files that cannot
        be used.
        """
        settings = settings or AccessSettings()
        self._allows_anonymous = settings.allow_anonymous
        self._needs_client_certificate = bool(settings.tls_client_ca)
        if not settings.tls_certificate and (settings.tls_key or settings.tls_client_ca):
            setting = "tls_key" if settings.tls_key else "tls_client_ca"
            raise SettingsError(f"{setting} is set, but tls_certificate is not", remedy="Set tls_certificate as well")
        pems = [path for path in (settings.tls_certificate, settings.tls_key, settings.tls_client_ca) if path]
        self._tls = Watched("the certificates", pems, lambda: server_context(settings, protocol)) if pems else None
        self._own = self_signed_context(protocol) if self_signed and not pems else None

    @property
    def ssl_context(self) -> ssl.SSLContext | None:
        """The context for new connections; None without TLS."""
        return self._own if self._tls is None else self._tls.value

    @property
    def has_files(self) -> bool:
        """Whether there is anything to `check`."""
        return self._tls is not None

    def check(self) -> bool:
        """Read files that have changed; returns whether `ssl_context` is a new one. May be called on any thread."""
        return self._tls is not None and self._tls.check()

    def check_address(self, host: str, addresses: Iterable[str]) -> None:
        """Raise SettingsError if anyone on a network could use this server. addresses: those of the host."""
        outside = [address for address in addresses if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
        if outside:
            self._check_outside(host)

    def _check_outside(self, host: str) -> None:
        """The same, for an address that others can reach."""
        if not (self._needs_client_certificate or self._allows_anonymous):
            raise SettingsError(
                f"host is {host!r}, where others can connect, and clients need no certificate",
                remedy="Set tls_client_ca (docs/security.md shows how), or accept with allow_anonymous that everyone "
                "who reaches this address may use it, or set host to 127.0.0.1",
            )


class Access(CertificateAccess):
    """The tokens and certificates of one HTTP server. Requests use the tokens that were read last."""

    def __init__(self, settings: AccessSettings | None = None) -> None:
        """Without settings: no tokens and no TLS, for loopback only. Raises SettingsError for files that cannot be
        used.
        """
        settings = settings or AccessSettings()
        super().__init__(settings)
        files = [path.strip() for path in settings.tokens_file.split(",") if path.strip()]

        def tokens() -> BearerTokens:
            return parse_tokens((file, read_text("tokens_file", file, FILE_BYTES_MAX)) for file in files)

        self._tokens = Watched("the tokens", files, tokens) if files else None

    @property
    def scheme(self) -> str:
        """The scheme of this server's URLs."""
        return "http" if self._tls is None else "https"

    @property
    def has_files(self) -> bool:
        """Whether there is anything to `check`."""
        return self._tokens is not None or super().has_files

    def check(self) -> bool:
        """Read files that have changed; returns whether `ssl_context` is a new one. May be called on any thread."""
        if self._tokens is not None:
            self._tokens.check()
        return super().check()

    def _check_outside(self, host: str) -> None:
        if self._tokens is None and not self._allows_anonymous:
            raise SettingsError(
                f"host is {host!r}, where others can connect, and there are no tokens",
                remedy="Set tokens_file (docs/security.md shows how), or accept with allow_anonymous that everyone who "
                "reaches this address may use it, or set host to 127.0.0.1",
            )
        if self._tokens is not None and self._tls is None:
            log.warning(
                "tokens are sent unencrypted to %s: set tls_certificate, unless a proxy or a mesh in front of this "
                "process encrypts the connections",
                host,
            )

    def middlewares(self, right_of: RightOf, key_header: str = "") -> list[Middleware]:
        """What checks each request; empty if there are no tokens, so that a check costs nothing then.

        key_header: may have the token if there is no Authorization.
        """
        return [] if self._tokens is None else [self._middleware(self._tokens, right_of, key_header)]

    @staticmethod
    def _middleware(tokens: Watched[BearerTokens], right_of: RightOf, key_header: str) -> Middleware:
        @web.middleware
        async def authorize(request: web.Request, handler: _Handler) -> web.StreamResponse:
            right = right_of(request)
            if right is not None:
                header = request.headers.get("Authorization")
                if header is None and key_header and key_header in request.headers:
                    header = f"Bearer {request.headers[key_header]}"
                request[_GRANT] = granted(tokens.value, header, right)
            return await handler(request)

        return authorize


def granted(tokens: BearerTokens, header: str | None, right: str) -> Grant:
    """The grant of an Authorization header; raises Unauthorized or Forbidden."""
    if header is None:
        raise Unauthorized("this call needs a bearer token", remedy="Send it as `Authorization: Bearer TOKEN`")
    scheme, _, token = header.partition(" ")
    grant = tokens.grant_of(token.strip()) if scheme.lower() == "bearer" else None
    if grant is None:
        raise Unauthorized("the bearer token is not known")
    if right != ANY_RIGHT and right not in grant.rights:
        raise Forbidden(
            f"the token of {grant.name!r} does not have the right {str(right)!r}",
            remedy="Add it to the token's rights in tokens_file, or use another token",
            right=right,
        )
    return grant


def grant_of(request: web.Request) -> Grant:
    """What the caller of a request may do; ANONYMOUS if the call needs no token, or if there are none."""
    grant: Grant = request.get(_GRANT, ANONYMOUS)
    return grant


def read_right(request: web.Request) -> str | None:
    """The right for a page of a process without an HTTP API: /metrics needs `read`, and checks of health need none."""
    return None if request.path in ("/healthz", "/health", "/ready") else Right.READ
