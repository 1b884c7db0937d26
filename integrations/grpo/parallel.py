"""The loop on several processes: every process holds the policy, samples and differentiates its share of the rollouts.

Started by torchrun. Decisions (budgets, advantages, weights, filters) are made on the whole batch by every process, so
only rollouts, rewards and gradients are exchanged.
"""

from __future__ import annotations

import dataclasses
import os

import torch
import torch.distributed as dist

from .config import TrainConfig


def deal(costs: list[int], size: int) -> list[list[int]]:
    """Indices of ``costs`` for each of ``size`` processes: the longest first, each to the process with least so far.

    >>> deal([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = loads.index(min(loads))
        shares[least].append(i)
        loads[least] += costs[i]
    return shares


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process is ``rank`` of ``size``; with one process nothing is exchanged."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, costs: torch.Tensor) -> torch.Tensor:
        """Indices of this process's part of rows with these costs (tokens), int64, ascending."""
        mine = sorted(deal(costs.tolist(), self.size)[self.rank])
        return torch.tensor(mine, dtype=torch.int64, device=costs.device)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the processes, on each of them, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        """The values of the first process, in place."""
        if self.size > 1:
            dist.broadcast(values, 0)
        return values

    def gather(self, mine: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
        """All ``rows`` rows of a tensor of which each process holds those at its ``index``."""
        whole = torch.zeros((rows, *mine.shape[1:]), dtype=mine.dtype, device=mine.device)
        whole[index] = mine
        if mine.dtype == torch.bool:
            return self.sum(whole.byte()).bool()
        return self.sum(whole)  # every row is zero on all processes but one: the sum is exact

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:  # a process without rows still takes part
                parameter.grad = torch.zeros_like(parameter)
            self.sum(parameter.grad)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any process."""
        return bool(self.sum(torch.tensor(int(flag), device=device)))

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        """Ends the process group. With one process there is none of ours: one that is there is an engine's."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join(config: TrainConfig) -> tuple[Processes, TrainConfig]:
    """This process's place among those of torchrun, and the configuration with this process's device.

    A ValueError if torchrun started several and ``parallel`` is "none".
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Processes(), config
    if config.parallel == "none":
        raise ValueError(f"parallel: 'none' is for one process, torchrun started {size}; set parallel: ddp")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if config.device in ("auto", "cuda"):
        config = config.replace(device=f"cuda:{local}" if torch.cuda.is_available() else "cpu")
    on_gpu = config.device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(torch.device(config.device))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return Processes(dist.get_rank(), size), config
