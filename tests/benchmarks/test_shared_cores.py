"""Promises of ``make bench-cores``: it measures each setting in a separate process."""

from __future__ import annotations

import pytest

from benchmarks.http.shared_cores import SETTINGS, main

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_each_setting_has_its_rates(capsys: pytest.CaptureFixture[str]) -> None:
    """Decoding and prefill have a line each, with a rate for each way of waiting."""
    assert main(["--busy", "0", "--seconds", "0.1", "--requests", "1"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    rates = [[float(figure.replace(",", "")) for figure in line.split()[-len(SETTINGS) :]] for line in lines]
    assert len(rates) == 2
    assert all(rate > 0 for of_kind in rates for rate in of_kind)
