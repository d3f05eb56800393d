"""One thread, one seed, the same drawn examples on every run."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("suite")


def pytest_configure():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pytest_addoption(parser):
    parser.addoption("--write-modes", metavar="JSON", help="where tests/generation/test_mode_table.py writes its table")
