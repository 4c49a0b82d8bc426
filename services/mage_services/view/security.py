"""Who is answered: requests to this machine by its own name, from our own pages, with the token.

A page of another site cannot read the token; one that has it rebound a name to 127.0.0.1, or posts
to us, says so in the headers `Host` and `Origin`, which a script cannot change.
"""

import hmac
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

OWN_NAMES = {"127.0.0.1", "localhost"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src-elem 'self'; "
    "style-src-attr 'unsafe-inline'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with `no-referrer` our own forms would say `Origin: null`
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Only our own files may be scripts and styles. Attributes may hold styles: templates write widths
and colours there, and every text of a run is escaped.
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def new_token() -> str:
    """128 bits that nobody guesses."""
    return secrets.token_urlsafe(16)


def refusal(request: web.Request, token: str) -> str:
    """Why a request is not answered; empty where it is."""
    host = request.headers.get("Host", "")
    if host.rsplit(":", 1)[0] not in OWN_NAMES:
        return "This server answers on its own machine alone, as 127.0.0.1 or localhost."
    if request.headers.get("Origin", f"http://{host}") != f"http://{host}":
        return "This server answers its own pages alone, and this request is of another site."
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return "Open the printed address by itself: links on other sites are refused."
    given = request.path.split("/", 2)[1]
    if not hmac.compare_digest(given.encode(), token.encode()):
        return "Open the address that `mage view` printed, with its token."
    return ""


async def harden(_: web.Request, response: web.StreamResponse) -> None:
    """Have every response, whatever made it, say what a browser may do with it."""
    response.headers.update(HEADERS)
    response.headers["Server"] = "mage"
