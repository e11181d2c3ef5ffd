"""Shared by all tests."""

import os

import pytest

try:
    import setuptools  # noqa: F401  replaces distutils, and refuses to once something has imported the old one
except ImportError:
    pass
from minicast.program import share_cores

share_cores()  # as a program does: other work beside real models would make their tests last
import torch


def tiny(request) -> bool:
    """Whether a test runs on tiny models alone."""
    return not (request.node.get_closest_marker("real") or request.node.get_closest_marker("slow"))


@pytest.fixture(autouse=True)
def threads(request):
    """One thread for tiny models, on which two only wait for each other; all of them, or as many as
    OMP_NUM_THREADS says, for real ones."""
    torch.set_num_threads(1 if tiny(request) else int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())))


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(request, monkeypatch, session_cache):
    """What is measured or learned in tests on tiny models stays out of the user's cache."""
    if tiny(request):
        monkeypatch.setenv("MINICAST_CACHE", str(session_cache))


@pytest.fixture(autouse=True)
def undisturbed(request, monkeypatch):
    """Costs of tiny models are kept whatever else runs here, so that the second probe of a deployment is none.

    Tests of that very check ask for `disturbable`.
    """
    if tiny(request) and "disturbable" not in request.fixturenames:
        from minicast import probe

        monkeypatch.setattr(probe.Timings, "steady", True)


@pytest.fixture
def disturbable():
    """See `undisturbed`."""
