"""The loop on several processes: each samples and differentiates its share of the rollouts.

Started by torchrun. Decisions (budgets, advantages, weights, filters) are made on the whole batch by every process, so
only rollouts, rewards and gradients are exchanged. With "ddp" every process holds the policy; with "fsdp2" each holds a
part of every weight, and layers are put together when they are needed (PyTorch's fully_shard).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

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
    """This process is ``rank`` of ``size``; with one process nothing is exchanged, nor divided (``sharded``)."""

    rank: int = 0
    size: int = 1
    sharded: bool = False

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

    def rows(self, mine: torch.Tensor, device: torch.device) -> torch.Tensor:
        """One tensor of each process as rows on the CPU, in the order of ranks; ``device`` exchanges them."""
        return self.gather(mine[None].to(device), torch.tensor([self.rank], device=device), self.size).cpu()

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:  # a process without rows still takes part
                parameter.grad = torch.zeros_like(parameter)
            self.sum(parameter.grad)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any process."""
        return bool(self.sum(torch.tensor(int(flag), device=device)))

    def largest(self, count: int, device: torch.device) -> int:
        """The largest count of all processes."""
        counts = torch.zeros(self.size, dtype=torch.int64, device=device)
        counts[self.rank] = count
        return int(self.sum(counts).max())

    @contextlib.contextmanager
    def gathered(self, model: torch.nn.Module) -> Iterator[None]:
        """All weights of a sharded model on every process, as long as the context lasts; each process has to enter it.

        Each may then make as many forward passes as it likes, as sampling does: its share decides how many. A model
        that is not sharded stays as it is.
        """
        parts: list[Any] = []
        if self.sharded:
            from torch.distributed.fsdp import FSDPModule

            parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.reshard()
                part.set_reshard_after_forward(True, recurse=False)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def reported(self, error: Exception) -> Exception:
        """What this process has to raise for an error of its run: the error, after telling the others of it.

        Where the error is only that an exchange with a process that failed broke down, a ConnectionError with that
        one's message, or saying that it left none.
        """
        if self.size == 1 or not dist.is_initialized():
            return error
        store = dist.distributed_c10d._get_default_store()
        key = f"coba_core/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        with contextlib.suppress(RuntimeError):  # of a store that is gone
            broken = isinstance(error, RuntimeError)
            if broken and store.check([key]):
                return ConnectionError(f"process {self.rank} ends, as {store.get(key).decode()}")
            if broken and any(word in str(error).lower() for word in ("by peer", "gloo", "nccl")):
                return ConnectionError(
                    f"process {self.rank} ends, as another did without a word (killed, or out of memory?); "
                    f"--resume goes on from the last checkpoint: {error}"
                )
            store.set(key, f"process {self.rank} failed: {error or type(error).__name__}")
        return error

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
        raise ValueError(f"parallel: 'none' is for one process, torchrun started {size}; set parallel: ddp or fsdp2")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if config.device in ("auto", "cuda"):
        config = config.replace(device=f"cuda:{local}" if torch.cuda.is_available() else "cpu")
    on_gpu = config.device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(torch.device(config.device))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return Processes(dist.get_rank(), size, sharded=config.parallel == "fsdp2"), config


def shard(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The model on ``device``, its weights divided among the processes, layer by layer; what is outside of the layers
    (embeddings, also tied ones, norm and head) is a part of its own. Changes the model itself.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole: Any = model
    base = whole.get_base_model() if hasattr(model, "get_base_model") else whole
    layers = set(base._no_split_modules or ())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model.to(device)  # buffers


def whole(value: Any, found: dict[int, torch.Tensor] | None = None) -> Any:
    """Values nested in dicts and lists, with sharded tensors put together in the CPU's memory, on every process.

    ``found``: tensors put together before, by the id of the sharded one, so that tied weights stay one.
    """
    from torch.distributed.tensor import DTensor

    found = {} if found is None else found
    if isinstance(value, dict):
        return {key: whole(inner, found) for key, inner in value.items()}
    if isinstance(value, list):
        return [whole(inner, found) for inner in value]
    if isinstance(value, DTensor):
        if id(value) not in found:
            found[id(value)] = value.full_tensor().detach().cpu()
        return found[id(value)]
    return value


def divided(state: dict[str, Any], parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
    """An optimiser's state with the tensors of sharded parameters divided as these are; the others as they were."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    by_parameter = {}
    for i, entry in state["state"].items():
        parameter = parameters[i]
        by_parameter[i] = {
            name: distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
            if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.shape == parameter.shape
            else value
            for name, value in entry.items()
        }
    return {**state, "state": by_parameter}
