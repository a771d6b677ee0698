"""Tests against other libraries, collected only when asked for by name: `pytest tests/peers` (`make test-peers`)."""

from __future__ import annotations


def pytest_configure(config):
    if asked_for(config):  # their warnings are theirs, dapcal's stay errors
        config.addinivalue_line("filterwarnings", "ignore")
        config.addinivalue_line("filterwarnings", "error::dapcal.DapcalWarning")


def pytest_ignore_collect(collection_path, config):
    return None if asked_for(config) else True


def asked_for(config) -> bool:
    return any("peers" in str(argument) for argument in config.invocation_params.args)
