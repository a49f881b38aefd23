"""Rank, world size and device of this process, read from the environment that torchrun sets."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch.distributed.distributed_c10d import _set_pg_timeout  # documented, if not yet public

from jpeg_dlm.errors import UsageError

# During setup the main process may prepare text or cache features for hours while the others wait (assumed).
SETUP_TIMEOUT_S = 48 * 3600.0


@dataclass(frozen=True)
class Ranks:
    """One of `world` processes; `local_rank` counts within its machine, and `device` belongs to it alone."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        """True for the one process that writes files and messages."""
        return self.rank == 0


def read_ranks(device: str | None, env: Mapping[str, str]) -> Ranks:
    """Read and check the ranks of an environment without starting anything."""
    world = _number(env, "WORLD_SIZE", 1)
    rank, local_rank = _number(env, "RANK", 0), _number(env, "LOCAL_RANK", 0)
    if world > 1 and "RANK" not in env:
        raise UsageError("WORLD_SIZE is set but RANK is not: start several processes with torchrun.")
    if not (0 <= rank < world and local_rank >= 0):
        raise UsageError(f"RANK {rank} and LOCAL_RANK {local_rank} do not fit WORLD_SIZE {world}: start with torchrun.")
    return Ranks(rank, world, local_rank, _device(device, local_rank))


def setup(device: str | None, timeout_s: float = SETUP_TIMEOUT_S) -> Ranks:
    """Join the other processes, if any, and return this one's ranks. `device` None takes a GPU if there is one."""
    ranks = read_ranks(device, os.environ)
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    if ranks.world > 1 and not torch_dist.is_initialized():
        if ranks.device.type not in ("cuda", "cpu"):
            raise UsageError(f"Several processes cannot share device '{ranks.device}': use cuda or cpu.")
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        try:
            timeout = timedelta(seconds=timeout_s)
            torch_dist.init_process_group(backend, timeout=timeout, rank=ranks.rank, world_size=ranks.world)
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"Cannot join the other processes ({error}): start them all with one torchrun.") from error
    return ranks


@contextlib.contextmanager
def step_timeout(timeout_s: float) -> Iterator[None]:
    """Limit collectives to `timeout_s` within the block; restore the timeout of the setup after it."""
    if not torch_dist.is_initialized():
        yield
        return
    _set_pg_timeout(timedelta(seconds=timeout_s))
    yield
    _set_pg_timeout(timedelta(seconds=SETUP_TIMEOUT_S))  # not needed after an error, which ends the process


def teardown() -> None:
    """Leave the process group, if this process joined one, at the end of a successful run.

    Delete the DistributedDataParallel model first: gloo threads that outlive the interpreter may abort the process (measured).
    After an error just exit: destroying the group can wait forever for a rank that is gone.
    """
    gc.collect()  # deletes models in reference cycles
    if torch_dist.is_available() and torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, default))
    except ValueError as error:
        raise UsageError(f"{name} is {env[name]!r}, not a number: start with torchrun or unset it.") from error


def _device(name: str | None, local_rank: int) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"'{name}' is not a device: use cpu, cuda or mps.") from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", local_rank)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"Device '{device}' does not exist, there are {torch.cuda.device_count()} GPUs: use device cpu.")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("Device 'mps' is not available on this machine: use device cpu.")
    return device
