"""Shared by all tests."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def threads(request):
    """One thread for tiny models, on which two only wait for each other; all of them for real ones."""
    real = request.node.get_closest_marker("real") or request.node.get_closest_marker("slow")
    torch.set_num_threads(os.cpu_count() if real else 1)
