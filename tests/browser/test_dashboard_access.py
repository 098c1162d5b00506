"""Promises of the live page when parts are unavailable: without a key, without pins, without a server."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, running_server
from tests.browser.conftest import save_screenshot
from tests.browser.crowd import working_crowd

KEY = "sk-look"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
]  # a browser, a server and its agents share the machine with other tests


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two API server processes, a policy that holds nothing, and a key."""
    model = make_model_folder(tmp_path_factory.mktemp("models") / "qwen3", max_position_embeddings=4096)
    flags = ("--api-server-count", "2", "--scheduling-policy", "fcfs", "--api-key", KEY)
    with (
        running_server(model, "--num-gpu-blocks-override", "6000", *flags) as server,
        working_crowd(server.url, num_agents=3, headers={"x-api-key": KEY}),
    ):
        yield server


def status(page: Page) -> Locator:
    return page.get_by_role("status")


def look(page: Page, server: Server) -> None:
    """Opens the page with a key that was entered in this tab before."""
    page.add_init_script(f"sessionStorage.setItem('continuum-key', '{KEY}')")
    page.goto(f"{server.url}/dashboard")
    expect(status(page)).to_have_text("live")


def test_a_key_is_asked_for(page: Page, page_errors: list[str], plain: Server) -> None:
    """A wrong key is rejected, the right one opens the page and stays for this tab, with any API server."""
    page.goto(f"{plain.url}/dashboard")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    page.get_by_role("textbox", name="API key").fill("sk-wrong")
    page.get_by_role("button", name="Show the dashboard").click()
    expect(page.get_by_role("alert")).to_have_text("The server did not take this key.")
    save_screenshot(page, "dashboard-key")
    page.get_by_role("textbox", name="API key").fill(KEY)
    page.get_by_role("button", name="Show the dashboard").click()
    expect(status(page)).to_have_text("live")
    page.reload()
    expect(status(page)).to_have_text("live")
    expect(dialog).to_be_hidden()
    assert page_errors == [error for error in page_errors if "401" in error]
    assert len(page_errors) == 2
    page_errors.clear()


def test_a_policy_that_holds_nothing_says_so(page: Page, plain: Server) -> None:
    """Under fcfs the page shows lanes and blocks, and a sentence in place of pins."""
    look(page, plain)
    expect(page.locator("#pins-empty")).to_contain_text("policy (fcfs) knows no jobs and pins nothing")
    expect(page.locator(".lane-names button").first).to_have_text(re.compile(r"fix-\d+"))
    expect(page.locator("#pool-note")).to_contain_text("A cell is 3 of them")
    page.locator(".lane-names button").first.click()
    expect(page.locator("#life")).to_contain_text("policy (fcfs) tracks no jobs")
    save_screenshot(page, "dashboard-fcfs")


@pytest.mark.long
def test_a_server_that_is_gone_is_said_to_be(page: Page, plain: Server) -> None:
    """When the server is gone, the page keeps its content, says so, and resumes when the server is back."""
    look(page, plain)
    expect(page.locator(".lane-names button").first).to_be_visible()  # something to keep
    os.kill(plain.core_pid(), signal.SIGSTOP)
    try:
        expect(status(page)).to_have_text("server gone")
        expect(page.locator("#notice")).to_have_text("The server has gone silent; trying again.")
        expect(page.locator(".lane-names button").first).to_be_visible()
        save_screenshot(page, "dashboard-gone")
    finally:
        os.kill(plain.core_pid(), signal.SIGCONT)
    expect(status(page)).to_have_text("live")
    expect(page.locator("#notice")).to_be_hidden()
