"""The live page's files, as responses. They are static; what they show comes from GET /live.

What lives here: reading the files and their headers. What must not: the page itself (page/) and its data (live).
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

_FOLDER = Path(__file__).parent / "page"

#: The page runs only its own script and style, and talks only to its router: a token that its user has entered cannot
#: leave through anything that another party has put on the page.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

PAGE, STYLE, SCRIPT = "live.html", "live.css", "live.js"

_TYPES = {PAGE: "text/html", STYLE: "text/css", SCRIPT: "text/javascript"}

_FILES = {name: (_FOLDER / name).read_bytes() for name in _TYPES}


def page_response(name: str) -> web.Response:
    """Answer with one of the files."""
    return web.Response(body=_FILES[name], content_type=_TYPES[name], charset="utf-8", headers=_HEADERS)
