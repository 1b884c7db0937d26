"""What verl needs to run without an accelerator: a platform, and an inference server that makes answers up.

verl loads it through VERL_USE_EXTERNAL_MODULES, in the driver and in every Ray worker. All else is verl's own: the
entry point, Ray, TransferQueue, agent loop, replay buffer, reward, balancing, FSDP2 engine, optimiser, checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import ray
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import import_utils
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

ANSWER_TOKENS = 10
"""Right answers end with a token below this number, wrong ones with one above: see `reward` below."""
SERVER = "made_up_server"
FAILS = (5, 11, 3)
"""The step (counted from 0) and prompt of which only the first request is answered."""


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The CPU, under the resource name that verl's placement groups ask for."""

    device_name = "cpu"
    vendor_name = "nvidia"  # a key of the engine registry
    device_module = SimpleNamespace(
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda *_: "CPU",
        is_available=lambda: True,
        set_device=lambda *_: None,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        reset_peak_memory_stats=lambda *_: None,
        mem_get_info=lambda *_: (0, 0),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:  # type: ignore[override]  # verl hands it to torch
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # what verl counts before it starts; ray.init is told that there is one

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


class Server:
    """In place of an inference server: the answer to a prompt is right as often as the prompt's difficulty says.

    Each answer is drawn from a generator seeded by the prompt, the step and how often it was asked in that step, so
    that a resumed run sees what an undisturbed one does.
    """

    def __init__(self) -> None:
        self.steps = 0  # how many updates the weights have had
        self.requests: dict[tuple[int, ...], int] = {}
        self.temperatures: dict[int, set[float]] = {}

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        place = (self.steps, *prompt_ids)
        asked = self.requests[place] = self.requests.get(place, -1) + 1
        if place == FAILS and asked:
            raise RuntimeError("this prompt's later requests fail")
        self.temperatures.setdefault(self.steps, set()).add(sampling_params["temperature"])
        draw = random.Random(f"{place} {asked}")
        right = draw.random() < (prompt_ids[-1] % 7) / 6
        tokens = [draw.randrange(20, 60) for _ in range(draw.randrange(1, 4))]
        tokens.append(draw.randrange(ANSWER_TOKENS) if right else draw.randrange(ANSWER_TOKENS, 20))
        versions = {"global_steps": self.steps, "min_global_steps": self.steps, "max_global_steps": self.steps}
        return TokenOutput(
            token_ids=tokens, log_probs=[-4.0] * len(tokens), stop_reason="completed", extra_fields=versions
        )

    async def set_steps(self, steps: int) -> None:
        self.steps = steps

    async def seen_temperatures(self) -> dict[int, set[float]]:
        return self.temperatures

    async def wake_up(self) -> None: ...

    async def sleep(self) -> None: ...


class Engine:
    """The part of a rollout engine that lives in verl's worker: takes the weights, all of them, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.sleep_level = 2
        self.weights = 0

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None, **_: Any
    ) -> None:
        self.weights = sum(tensor.numel() for _, tensor in weights)
        server = ray.get_actor(SERVER)
        await server.set_steps.remote(global_steps or 0)


def reward(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> dict[str, float]:
    """`acc` is 1 for an answer whose last token is one of the right ones; the score is that less a bit for length."""
    words = solution_str.split()
    right = float(int(words[-1][1:]) < ANSWER_TOKENS)
    return {"score": right - 0.2 * len(words), "acc": right}


class Replica(RolloutReplica):  # type: ignore[misc]
    """Starts the server."""

    async def launch_servers(self) -> None:
        server = ray.remote(Server).options(num_cpus=0, name=SERVER).remote()
        self.servers = [server]
        self._server_address, self._server_handle = "made-up:0", server


def _one_gloo() -> None:
    """verl asks for gloo on the CPU and something else on the device; on the CPU that names the CPU twice."""
    start = torch.distributed.init_process_group

    @functools.wraps(start)
    def init_process_group(backend: str | None = None, **options: Any) -> None:
        start("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **options)

    torch.distributed.init_process_group = init_process_group


import_utils.is_trl_available = lambda: False  # verl 0.9.1 imports a class that the TRL in this environment has dropped
RolloutReplicaRegistry.register("made_up", lambda: Replica)
base._ROLLOUT_REGISTRY["made_up", "async"] = f"{__name__}.Engine"
_one_gloo()
assert os.environ["VERL_PLATFORM"] == "cpu"
