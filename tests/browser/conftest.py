"""A real browser for our pages: the system's chromium or Playwright's. Without one, tests are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Error,
    Page,
    Playwright,
    Route,
    expect,
    sync_playwright,
)

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOTS = Path(__file__).resolve().parents[2] / "out" / "screenshots"
WINDOW = {"width": 1440, "height": 900}
LOCAL_HOSTS = ("", "127.0.0.1", "localhost")
"""Hosts that a page may reach; the empty one belongs to files and data URLs."""
PATIENCE_MS = 60_000
"""Timeout for what a test waits to appear: tests share the machine."""


def chromium_path(playwright: Playwright) -> str | None:
    """The browser on the PATH, else the one that ``playwright install`` installed, else None."""
    for name in CHROMIUM_NAMES:
        if found := shutil.which(name):
            return found
    own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


# Not for the whole session: while Playwright runs, an event loop counts as running on this thread, and tests
# that start their own could not run.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One browser for all tests of this folder."""
    with sync_playwright() as playwright:
        path = chromium_path(playwright)
        if path is None:
            pytest.skip(
                f"no browser: none of {', '.join(CHROMIUM_NAMES)} is on the PATH, and "
                "`playwright install chromium` has not been run"
            )
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments, timeout=PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture
def page_errors() -> Iterator[list[str]]:
    """Errors of the page and its requests to other hosts; a test that expects some removes them."""
    errors: list[str] = []
    yield errors
    assert errors == []


@pytest.fixture
def page(browser: Browser, page_errors: list[str]) -> Iterator[Page]:
    """A fresh page in its own profile; the test fails if ``page_errors`` is not empty at its end."""
    context = browser.new_context(viewport={"width": WINDOW["width"], "height": WINDOW["height"]})
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    watch_page(page, page_errors)
    yield page
    context.close()


def watch_page(page: Page, errors: list[str]) -> None:
    """Records exceptions, logged errors and requests to other hosts, which are refused."""

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            errors.append(message.text)

    def on_error(error: Error) -> None:
        errors.append(str(error))

    def refuse(route: Route) -> None:
        errors.append(f"asked another host: {route.request.url}")
        route.abort()

    page.on("console", on_console)
    page.on("pageerror", on_error)
    page.route(_is_elsewhere, refuse)


def _is_elsewhere(url: str) -> bool:
    return (urlsplit(url).hostname or "") not in LOCAL_HOSTS


def save_screenshot(page: Page, name: str) -> Path:
    """Saves a screenshot of the whole page as build output: ``out/screenshots/NAME.png``."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    return path
