"""Renders a page: one file that runs only its own scripts and makes no network requests."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from functools import cache

import jinja2
import msgspec

from eval.trace.page.assets import asset, plotting, style
from eval.trace.page.page_data import PageData, TraceFacts

SCRIPTS = (
    "basics.js",
    "time_window.js",
    "tables.js",
    "job_model.js",
    "gantt.js",
    "pool_charts.js",
    "tool_chart.js",
    "job_life.js",
    "main.js",
)


def render(page: PageData) -> str:
    """Returns the HTML of a page."""
    sheet = style("page.css")
    scripts = [plotting(), *(asset(name) for name in SCRIPTS)]
    return _template().render(
        policy=_content_policy(sheet, scripts),
        trace=page.trace,
        facts=_facts(page.trace),
        figures=page.figures,
        warnings=page.warnings,
        notes=page.notes,
        style=sheet,
        scripts=scripts,
        data=_json(page),
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(asset("page.jinja"))


def _content_policy(sheet: str, scripts: list[str]) -> str:
    """Returns a policy that allows only these scripts and this style, whatever the trace contains."""
    allowed = " ".join(_digest(script) for script in scripts)
    own = f"script-src {allowed}; style-src {_digest(sheet)}"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(page: PageData) -> str:
    """Returns JSON that cannot close the HTML element that contains it."""
    return msgspec.json.encode(page).decode().replace("<", "\\u003c")


def _facts(trace: TraceFacts) -> list[str]:
    facts = [f"policy {trace.policy or 'unknown'}", f"{_duration(trace.duration_s)} of engine time"]
    if trace.began is not None:
        facts.append(f"began {trace.began}")
    facts.append(f"{trace.num_blocks:,} KV blocks of {trace.block_size} tokens")
    if trace.num_host_blocks:
        facts.append(f"{trace.num_host_blocks:,} copies in host memory")
    facts.append(
        f"at most {trace.max_num_seqs:,} requests and {trace.max_num_batched_tokens:,} tokens a step"
    )
    return facts


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    return (
        f"{minutes} min {round(seconds) % 60} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
    )
