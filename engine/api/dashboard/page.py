"""Builds the page as one file of markup, style and scripts, with a content security policy.

The page is served without a key and holds no data; it fetches that with the reader's own key.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources

SCRIPTS = (
    *("base.js", "words.js", "state.js", "feed.js", "spark.js", "blocks.js", "lanes.js", "pins.js"),
    *("decisions.js", "life.js", "main.js"),
)
"""The scripts in order: each may use definitions of those before it."""


@dataclass(frozen=True, slots=True)
class Page:
    """The response to ``GET /dashboard``."""

    html: str
    headers: dict[str, str]


@cache
def dashboard_page() -> Page:
    style = _asset("tokens.css") + _asset("style.css")
    script = "\n".join(_asset(name) for name in SCRIPTS)
    html = _asset("page.html").replace("/* STYLE */", style).replace("/* SCRIPT */", script)
    headers = {
        "Content-Security-Policy": _content_policy(style, script),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(html, headers)


def _asset(name: str) -> str:
    return (resources.files("engine.api.dashboard") / "assets" / name).read_text(encoding="utf-8")


def _content_policy(style: str, script: str) -> str:
    """The content security policy: only this script and style, and requests to this server only. Text from
    clients is never executed."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "connect-src 'self'",
            "img-src data:",
            *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        )
    )


def _digest(text: str) -> str:
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()
