"""The device that models run on: its name, its clock, and the copy of results to the host."""

import os
import platform
import time

import torch
from torch import Tensor


def device_name(device: torch.device) -> str:
    """A GPU's name, or this machine's processor with its number of cores and of torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def processor() -> str:
    """The model of this machine's CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def clock(device: torch.device) -> float:
    """Seconds on a clock without a fixed start, read after the device has finished all work given to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def to_host(values: Tensor) -> Tensor:
    """values (any shape) -> the same in host memory, once they have been computed: the one host sync of a round."""
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(values.device))
    done.synchronize()
    return host
