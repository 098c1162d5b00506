"""Promises of the browser fixtures that other tests rely on: a page's errors are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.slow


def test_what_a_page_complains_of_is_known_to_the_test(
    page: Page, page_errors: list[str], tmp_path: Path
) -> None:
    """Logged errors, exceptions and requests to other hosts each fail a test that does not expect them."""
    file = tmp_path / "page.html"
    file.write_text(
        """<h1>ready</h1><img src="http://192.0.2.1/a.png">
        <script>console.error("logged"); console.log("harmless"); throw new Error("thrown")</script>"""
    )
    page.goto(file.as_uri())
    expect(page.locator("h1")).to_have_text("ready")
    complaints = set(page_errors)
    page_errors.clear()
    assert complaints >= {"asked another host: http://192.0.2.1/a.png", "logged", "thrown"}
    assert "harmless" not in complaints
