"""Shared by all tests."""

import os

import pytest

try:
    import setuptools  # noqa: F401  replaces distutils, and refuses to once something has imported the old one
except ImportError:
    pass
import torch


@pytest.fixture(autouse=True)
def threads(request):
    """One thread for tiny models, on which two only wait for each other; all of them for real ones."""
    real = request.node.get_closest_marker("real") or request.node.get_closest_marker("slow")
    torch.set_num_threads(os.cpu_count() if real else 1)


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(request, monkeypatch, session_cache):
    """What is measured or learned in tests on tiny models stays out of the user's cache."""
    if not (request.node.get_closest_marker("real") or request.node.get_closest_marker("slow")):
        monkeypatch.setenv("MINICAST_CACHE", str(session_cache))
