"""The processes that work together: rank, device and precision of this one, and what all do in common.

With one process the collective functions are the identity; every process must call them in the same order.
"""

from __future__ import annotations

import gc
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.nn.functional import all_reduce

from jpeg_dlm.util.errors import JpegDlmError, UsageError, reason_of

if TYPE_CHECKING:
    from jpeg_dlm.config import Config

# The longest wait for another process: the main one may prepare text or cache features for hours (assumed). When a
# process ends, torchrun ends the others.
TIMEOUT_S = 48 * 3600.0
FAIL_TOGETHER_S = 60.0  # within which processes fail alike (assumed)

Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """One of `world` processes, and the device that belongs to it alone."""

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        """True for the one process that writes files and messages."""
        return self.rank == 0


def read_ranks(device: str | None, env: Mapping[str, str]) -> Ranks:
    """Read and check the ranks of an environment, as torchrun sets them, without starting anything."""
    try:
        world, rank, local_rank = (int(env.get(name, n)) for name, n in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    except ValueError as error:
        raise UsageError(f"WORLD_SIZE, RANK or LOCAL_RANK is not a number ({error}): start with torchrun.") from error
    if not (0 <= rank < world and local_rank >= 0 and (world == 1 or "RANK" in env)):
        raise UsageError(f"RANK {rank} and LOCAL_RANK {local_rank} do not fit WORLD_SIZE {world}: start with torchrun.")
    try:
        own = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UsageError(f"'{device}' is not a device: use cpu, cuda or mps.") from error
    if own.type == "cuda" and own.index is None:
        own = torch.device("cuda", local_rank)
    if own.type == "cuda" and (own.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"Device '{own}' does not exist, there are {torch.cuda.device_count()} GPUs: use device cpu.")
    if own.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("Device 'mps' is not available on this machine: use device cpu.")
    return Ranks(rank, world, own)


def setup(device: str | None, timeout_s: float = TIMEOUT_S) -> Ranks:
    """Join the other processes, if any, and return this one's ranks. `device` None takes a GPU if there is one."""
    ranks = read_ranks(device, os.environ)
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    if ranks.world > 1 and not dist.is_initialized():
        if ranks.device.type not in ("cuda", "cpu"):
            raise UsageError(f"Several processes cannot share device '{ranks.device}': use cuda or cpu.")
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), rank=ranks.rank, world_size=ranks.world)
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"Cannot join the other processes ({error}): start them all with one torchrun.") from error
    return ranks


def teardown() -> None:
    """Leave the process group, if this process joined one, at the end of a successful run.

    Delete the DistributedDataParallel model first: gloo threads that outlive the interpreter may abort the process (measured).
    After an error just exit: destroying the group can wait forever for a rank that is gone.
    """
    gc.collect()  # deletes models in reference cycles
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


# ---------------------------------------------------------------- the CPU, and the precision of training


def cpu_name() -> str:
    """Return the model name of the CPU; elsewhere than on Linux, its architecture."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)", info.read_text("utf-8", "replace") if info.is_file() else "", re.MULTILINE)
    return names[0] if names else platform.machine()


def training_precision(requested: str, device: str) -> Literal["fp32", "bf16"]:
    """Resolve `train.precision`: 'auto' is bf16 on CUDA (paper), and on a CPU that has instructions for it."""
    if requested != "auto":
        return "bf16" if requested == "bf16" else "fp32"
    # Without these instructions bf16 is emulated, many times slower than fp32 (measured).
    return "bf16" if device == "cuda" or (device == "cpu" and torch.cpu._is_avx512_bf16_supported()) else "fp32"


def with_precision(config: Config, device: str) -> Config:
    """Return the config with the training precision for a kind of device."""
    return replace(config, train=replace(config.train, precision=training_precision(config.train.precision, device)))


# ---------------------------------------------------------------- collectives


def world_size() -> int:
    """Number of processes that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_sum(t: Tensor) -> Tensor:
    """Return the elementwise sum of `t` over all processes, without changing `t`.

    Its backward is the same sum of the incoming gradients, which is right when gradients are averaged over processes; every
    process must backpropagate through it.
    """
    return all_reduce(t) if world_size() > 1 else t


def all_mean(t: Tensor) -> Tensor:
    """Return the elementwise mean of `t` over all processes; differentiable."""
    return all_sum(t) / world_size() if world_size() > 1 else t


def barrier() -> None:
    """Wait until every process has reached this call."""
    if world_size() > 1:
        dist.barrier()


def shared(items: Sequence[Item], work: Callable[[Item], Value]) -> list[Value]:
    """Return `work(item)` of all items, in order; each process does its share of them and gets the others' results."""
    if world_size() == 1:
        return [work(item) for item in items]
    each: list[Any] = [None] * world_size()
    dist.all_gather_object(each, [work(item) for item in items[dist.get_rank() :: len(each)]])
    return [each[i % len(each)][i // len(each)] for i in range(len(items))]


def on_main(make: Callable[[], Value]) -> Value:
    """Return on every process what `make` gives on the main one, or raise its error on every process."""
    if world_size() == 1:
        return make()
    own: Exception | None = None
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = make()
        except Exception as error:
            own = error
            answer[1] = error if isinstance(error, JpegDlmError) else RuntimeError(reason_of(error))
    dist.broadcast_object_list(answer, 0)
    if error := own or answer[1]:
        raise error
    return answer[0]


def main_first(make: Callable[[], Value]) -> Value:
    """Run `make` on the main process and then on the others, which find what the main process stored."""
    if world_size() > 1 and dist.get_rank() > 0:
        barrier()
        return make()
    made = make()
    barrier()
    return made


def failed_together(name: str) -> bool:
    """Return True if every process calls this with the same name soon, and none waits for the others in a collective."""
    if world_size() == 1:
        return True
    store, until = _get_default_store(), time.monotonic() + FAIL_TOGETHER_S
    store.add(name, 1)
    while store.add(name, 0) < world_size():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
