"""Promises of the live page, in a real browser, on a real server that agents use."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, running_server
from tests.browser.conftest import save_screenshot
from tests.browser.crowd import working_crowd

NUM_BLOCKS = 300
"""Too few blocks for the agents' jobs together: pins break, and turns are preempted."""
MARKUP = '<img src="x" onerror="console.error(1)"><b>bold</b>'
PATIENCE_S = 90.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
]  # a browser, a server and its agents share the machine with other tests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def busy(model: Path) -> Iterator[Server]:
    """A server with pins that agents use."""
    with (
        running_server(model, "--num-gpu-blocks-override", str(NUM_BLOCKS)) as server,
        working_crowd(server.url, num_agents=6),
    ):
        yield server


def await_true(condition: Callable[[], bool], promise: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {promise}"


def look(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/dashboard")
    expect(page.get_by_role("status")).to_have_text("live")


def num_viewers(server: Server) -> float:
    metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
    (number,) = re.findall(r"^continuum:dashboard_viewers\{.*\} (.*)$", metrics, re.MULTILINE)
    return float(number)


def countdowns(page: Page) -> dict[str, float]:
    """Seconds left of each pin that has a countdown, by pin number."""
    told: list[list[str]] = page.eval_on_selector_all(
        ".pin-list li",
        "rows => rows.map(row => [row.dataset.pin, row.querySelector('.countdown').innerText])",
    )
    return {pin: float(text[:-2]) for pin, text in told if re.fullmatch(r"[\d.]+ s", text)}


@pytest.mark.long
def test_the_page_shows_the_engine_at_work(page: Page, busy: Server) -> None:
    """The page shows the running engine's figures, lanes, map, pins and decisions."""
    look(page, busy)
    tiles = page.locator(".tile")
    expect(tiles).to_have_count(6)
    expect(tiles.filter(has_text="Tokens generated").locator(".value")).to_have_text(re.compile(r"[1-9]"))
    expect(tiles.filter(has_text="found in cache").locator(".value")).to_contain_text("%")
    expect(page.locator(".lane-names button").first).to_have_text(re.compile(r"fix-\d+"))
    expect(page.locator("#pool-note")).to_contain_text(f"{NUM_BLOCKS - 1} blocks of 16 tokens")
    for kind in ("running", "cached"):
        expect(page.locator(f"#pool-legend [data-kind={kind}] b")).to_have_text(re.compile(r"[1-9]"))
    expect(page.locator(".decision-list li", has_text="is pinned for").first).to_be_visible()
    expect(page.locator(".decision-list li", has_text="returned after").first).to_be_visible()
    expect(page.locator(".decision-list li").nth(60)).to_be_attached()  # for the screenshot
    save_screenshot(page, "dashboard-light")
    page.emulate_media(color_scheme="dark")
    save_screenshot(page, "dashboard-dark")


def test_a_countdown_runs(page: Page, busy: Server) -> None:
    """A pin's remaining time decreases while the page is open."""
    look(page, busy)
    first: dict[str, float] = {}

    def has_run() -> bool:
        now = countdowns(page)
        for pin, seconds in now.items():
            first.setdefault(pin, seconds)
        return any(first[pin] - seconds > 0.25 for pin, seconds in now.items())

    await_true(has_run, "a pin's countdown")


def test_a_click_opens_a_jobs_life(page: Page, busy: Server) -> None:
    """A click shows the job's turns with their receipts and the decisions about it; Escape closes it."""
    look(page, busy)
    # A page keeps what it has seen: it shows the pins that it saw of a job.
    page.locator(".decision-list li", has_text="is pinned for").first.get_by_role("button").click()
    life = page.locator("#life")
    expect(life).to_be_visible()
    expect(life.locator("h2")).to_have_text(re.compile(r"fix-\d+"))
    expect(life.locator("tbody tr[data-turn]").first).to_be_visible()
    expect(life.locator(".decision-list li", has_text="is pinned for").first).to_be_visible()
    save_screenshot(page, "dashboard-life")
    page.keyboard.press("Escape")
    expect(life).to_be_hidden()


def test_what_clients_say_stays_text(page: Page, busy: Server) -> None:
    """A job whose name is markup appears by that name as text, everywhere."""
    look(page, busy)
    body = {"messages": [{"role": "user", "content": "look " * 60}], "job_id": MARKUP, "max_tokens": 4}
    httpx.post(f"{busy.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    name = page.locator(".lane-names button", has_text="<img")
    expect(name).to_have_text(MARKUP)
    name.click()
    expect(page.locator("#life h2")).to_have_text(MARKUP)
    expect(page.locator("#life tbody tr[data-turn]").first).to_be_visible()
    assert page.locator("main img, main b:has-text('bold')").count() == 0


def test_a_page_that_is_closed_costs_nothing(page: Page, busy: Server) -> None:
    """The server counts viewers, and the count returns to none when the page closes."""
    look(page, busy)
    await_true(lambda: num_viewers(busy) >= 1, "the page is counted")
    page.close()
    await_true(lambda: num_viewers(busy) == 0, "nobody looks any more")
