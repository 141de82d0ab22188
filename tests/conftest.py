"""Shared by all tests. Where CI=true a skipped test is a failure: a tool that a test needs must be installed."""

from __future__ import annotations

import os

import pytest


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None or exitstatus != pytest.ExitCode.OK:
        return
    if skipped := reporter.stats.get("skipped"):
        for report in skipped:
            reporter.write_line(f"skipped, which CI does not allow: {report.nodeid}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
