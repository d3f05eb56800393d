"""A failed test shows what the server wrote."""

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and server is not None:
        report.sections.append(("log of the server", server.log.read_text()[-6000:]))
    return report
