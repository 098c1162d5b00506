"""The page itself, as one file: markup, style and script put together, and the policy that allows no more.

It comes without a key and holds nothing; what it shows it fetches with the reader's own.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources

from tracing.report import assets

SCRIPTS = (
    *("base.js", "words.js", "state.js", "feed.js", "spark.js", "blocks.js", "lanes.js", "pins.js"),
    *("decisions.js", "life.js", "main.js"),
)
"""In this order one script: each may use what those before it define."""


@dataclass(frozen=True, slots=True)
class Page:
    """What is answered to ``GET /dashboard``."""

    html: str
    headers: dict[str, str]


@cache
def dashboard_page() -> Page:
    style = assets.asset("tokens.css") + _asset("style.css")
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
    """Only this script and this style, and requests to this server only: what clients say stays text."""
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
