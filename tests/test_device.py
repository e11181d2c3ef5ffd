"""The device: what it is called."""

import io
import os

import torch

from model import device


def test_the_processor_is_named(monkeypatch):
    """By the line of its model; where there is no such file, or no such line, as Python has it."""
    found = {"model": "processor : 0\nmodel name\t: A: B\n", "none": "processor : 0\n"}
    for kind, name in (("model", "A: B"), ("none", "P"), ("absent", "P")):

        def opened(*_, **__):
            if kind not in found:
                raise FileNotFoundError
            return io.StringIO(found[kind])

        monkeypatch.setattr(device, "open", opened, raising=False)
        monkeypatch.setattr(device.platform, "processor", lambda: "P")
        assert device.processor() == name


def test_a_device_is_named_by_what_its_speed_rests_on(monkeypatch):
    """A GPU's own name; of a CPU its model, its cores and the threads in use."""
    monkeypatch.setattr(device, "processor", lambda: "P")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"G{device.index}")
    assert device.device_name(torch.device("cpu")) == "P, 8 cores, 3 threads"
    assert device.device_name(torch.device("cuda", 1)) == "G1"
