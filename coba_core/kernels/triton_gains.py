"""Beta log-density, saturation, log gains and gains on a card; the formulas are those of numpy_backend.py.

Pass rates and results are float32 or float64 tensors [M]; the arithmetic is float64 for both, since at α, β of 1,000
the terms of a log-density cancel to less than float32 holds. No gradients.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl

from coba_core.kernels import numpy_backend as reference
from coba_core.kernels.numpy_backend import Form
from coba_core.kernels.triton_elementary import exp, expm1, log, log_beta, log_sum

EXPONENTIAL = tl.constexpr(reference.EXPONENTIAL)
FIRST_SUCCESS = tl.constexpr(reference.FIRST_SUCCESS)
MIXED_GROUP = tl.constexpr(reference.MIXED_GROUP)
S0, S1, S2, S3, S4, S5 = (tl.constexpr(x) for x in reference.SERIES)
INFINITY = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))

BLOCK = 1024


# ---- device functions ------------------------------------------------------------------------------------------------


@triton.jit
def parameter(x, step, at, mask, DEVICE: tl.constexpr):
    """A number of the form: from memory (step 0: one for all), or the bits of a float64 handed over as an integer."""
    if DEVICE:
        return tl.load(x + at * step, mask=mask, other=1.0).to(tl.float64)
    else:
        return x.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def log_share(k):
    """ln((1 - e^-k)/k) for k > ½."""
    decay = exp(-k)
    rest = 1.0 - decay
    return log_sum(rest, (1.0 - rest) - decay) - log(k)


@triton.jit
def coefficients(p, p_exponent, q_exponent, log_scale, rate, SATURATION: tl.constexpr, STEEP: tl.constexpr):
    """(a, k, d): the part of the log gain that does not depend on B, its slope, and ln M - ln m.

    STEEP: whether k may exceed ½. A pass rate outside [0, 1] or NaN gains nothing.
    """
    q = 1.0 - p
    lost = (1.0 - q) - p  # q + lost is 1 - p without rounding
    log_p = log(p)
    log_q = log_sum(q, lost)
    a = (p_exponent * log_p + q_exponent * log_q) - log_scale
    d = p * 0.0
    k = p * 0.0
    inside = (p > 0.0) & (p < 1.0)
    if SATURATION == EXPONENTIAL:
        k = (p * q) * rate
        kk = k * k
        t = -0.5 * k + kk * (S0 + kk * (S1 + kk * (S2 + kk * (S3 + kk * (S4 + kk * S5)))))
        if STEEP:
            if tl.max(tl.where(inside, k, 0.0), 0) > 0.5:
                t = tl.where(k > 0.5, log_share(k), t)
        a = a + t
    elif SATURATION == FIRST_SUCCESS:
        k = tl.where(p == 1.0, INFINITY, -log_q)
        solved = tl.where(q_exponent == 0.0, -log_scale, tl.where(q_exponent > 0.0, -INFINITY, INFINITY))
        a = tl.where(p == 1.0, solved, a)
        inside = (p > 0.0) & (p <= 1.0)
    elif SATURATION == MIXED_GROUP:
        log_big = tl.where(log_p > log_q, log_p, log_q)
        log_small = tl.where(log_p > log_q, log_q, log_p)
        k = -log_big
        d = log_big - log_small
    return (
        tl.where(inside & (a == a), a, -INFINITY),
        tl.where(inside, k, 0.0),
        tl.where(inside, d, 0.0),
    )


@triton.jit
def log_gain(a, k, d, budget, SATURATION: tl.constexpr):
    """The log gain of one more rollout at float64 budgets that broadcast against a, k, d."""
    if SATURATION == EXPONENTIAL:
        return a - k * budget
    elif SATURATION == FIRST_SUCCESS:
        gain = a - k * budget
        gain = tl.where(gain == gain, gain, -INFINITY)
        return tl.where(budget == 0.0, a, gain)
    elif SATURATION == MIXED_GROUP:
        share = exp(-(d * (budget - 1.0)))
        total = 1.0 + share
        return (a - k * (budget - 1.0)) + log_sum(total, share - (total - 1.0))
    else:
        return a - log(budget * (budget + 1.0))


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["alpha", "beta", "size"])
def log_density_kernel(
    p_pointer, alpha, beta, alpha_step, beta_step, log_scale, out, size, DEVICE: tl.constexpr, BLOCK: tl.constexpr
):
    """[M] (α-1) ln p + (β-1) ln(1-p) - ln B(α, β); with scalars ln B comes ready in log_scale."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    p = tl.load(p_pointer + at, mask=mask, other=0.5).to(tl.float64)
    a = parameter(alpha, alpha_step, at, mask, DEVICE)
    b = parameter(beta, beta_step, at, mask, DEVICE)
    if DEVICE:
        scale = log_beta(a, b)
    else:
        scale = log_scale.to(tl.int64).to(tl.float64, bitcast=True)
    q = 1.0 - p
    p_part = (a - 1.0) * tl.where(p > 0.0, log(p), -INFINITY)
    q_part = (b - 1.0) * tl.where(q > 0.0, log_sum(q, (1.0 - q) - p), -INFINITY)
    p_part = tl.where(a == 1.0, 0.0, p_part)
    q_part = tl.where(b == 1.0, 0.0, q_part)
    density = tl.where((p >= 0.0) & (p <= 1.0), (p_part + q_part) - scale, NAN)
    tl.store(out + at, density.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rate", "size"])
def saturation_kernel(
    p_pointer, budgets, rate, rate_step, out, size, SATURATION: tl.constexpr, DEVICE: tl.constexpr, BLOCK: tl.constexpr
):
    """[M] s(B, p)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    p = tl.load(p_pointer + at, mask=mask, other=0.5).to(tl.float64)
    budget = tl.load(budgets + at, mask=mask, other=1).to(tl.float64)
    q = 1.0 - p
    if SATURATION == EXPONENTIAL:
        level = -expm1(-(((p * q) * parameter(rate, rate_step, at, mask, DEVICE)) * budget))
    elif SATURATION == FIRST_SUCCESS:
        miss = tl.where(p < 1.0, log_sum(q, (1.0 - q) - p), -1e3)
        level = tl.where(budget > 0.0, -expm1(budget * miss), 0.0)
    elif SATURATION == MIXED_GROUP:
        rare = tl.where(p < q, p, q)
        often = 1.0 - rare
        level = -expm1(budget * log_sum(often, (1.0 - often) - rare)) - exp(budget * log(rare))
        level = tl.where(rare > 0.0, level, 0.0)
    else:
        level = -(p * q) / budget
    tl.store(out + at, level.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["p_exponent", "q_exponent", "log_scale", "rate", "size"])
def gains_kernel(
    p_pointer,
    budgets,
    p_exponent,
    q_exponent,
    log_scale,
    rate,
    p_step,
    q_step,
    scale_step,
    rate_step,
    log_out,
    out,
    size,
    SATURATION: tl.constexpr,
    DEVICE: tl.constexpr,
    STEEP: tl.constexpr,
    LOGS: tl.constexpr,
    GAINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[M] the log gain of rollout B+1, and the gain V(B+1) - V(B) itself, without the difference."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    p = tl.load(p_pointer + at, mask=mask, other=0.5).to(tl.float64)
    a, k, d = coefficients(
        p,
        parameter(p_exponent, p_step, at, mask, DEVICE),
        parameter(q_exponent, q_step, at, mask, DEVICE),
        parameter(log_scale, scale_step, at, mask, DEVICE),
        parameter(rate, rate_step, at, mask, DEVICE),
        SATURATION,
        STEEP,
    )
    gain = log_gain(a, k, d, tl.load(budgets + at, mask=mask, other=1).to(tl.float64), SATURATION)
    if LOGS:
        tl.store(log_out + at, gain.to(log_out.dtype.element_ty), mask=mask)
    if GAINS:
        tl.store(out + at, exp(gain).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["size"])
def beta_form_kernel(
    alpha,
    beta,
    tau,
    alpha_step,
    beta_step,
    tau_step,
    p_exponent,
    q_exponent,
    log_scale,
    rate,
    size,
    BLOCK: tl.constexpr,
):
    """[size] the numbers of the Beta × Exponential form: α, β, ln B(α, β) + ln τ, 1/τ."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    a = tl.load(alpha + at * alpha_step, mask=mask, other=1.0).to(tl.float64)
    b = tl.load(beta + at * beta_step, mask=mask, other=1.0).to(tl.float64)
    t = tl.load(tau + at * tau_step, mask=mask, other=1.0).to(tl.float64)
    tl.store(p_exponent + at, a, mask=mask)
    tl.store(q_exponent + at, b, mask=mask)
    tl.store(log_scale + at, log_beta(a, b) + log(t), mask=mask)
    tl.store(rate + at, 1.0 / t, mask=mask)


# ---- calls -----------------------------------------------------------------------------------------------------------


P = ParamSpec("P")
R = TypeVar("R")


def beside_its_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """Launches on the card of the first tensor among the arguments, whichever card is the current one."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        tensors = (x for x in args if isinstance(x, torch.Tensor))
        device = next((x.device for x in tensors if x.device.type == "cuda"), None)
        here: AbstractContextManager[Any] = nullcontext() if device is None else torch.cuda.device(device)
        with here:
            return function(*args, **options)

    return call


def real(x: torch.Tensor) -> torch.Tensor:
    """x as contiguous float32 or float64; another type is widened to float64."""
    x = x.detach()
    return (x if x.dtype in (torch.float32, torch.float64) else x.double()).contiguous()


class Parameters(NamedTuple):
    """The numbers of a form as a kernel takes them."""

    values: tuple[Any, ...]
    steps: tuple[int, ...]
    device: bool  # in device memory, or as the bits of host numbers
    steep: bool


def bits(x: float) -> int:
    """A float64 as the signed integer of its bits: Triton would hand a Python float over as a float32."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def on_device(x: Any, like: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x as float64 on the card, and its step: 0 for one number, 1 for one a prompt. A Python number does not wait."""
    if isinstance(x, torch.Tensor):
        tensor = x.to(like.device, torch.float64).contiguous()
    elif isinstance(x, np.ndarray) and x.ndim:
        tensor = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64)).to(like.device)
    else:
        tensor = torch.full((1,), float(x), dtype=torch.float64, device=like.device)
    if tensor.numel() not in (1, like.numel()) or tensor.ndim > 1:
        raise ValueError(f"a parameter has shape {tuple(tensor.shape)}, not one number or [{like.numel()}]")
    return tensor, 0 if tensor.numel() == 1 else 1


def parameters(numbers: tuple[Any, ...], like: torch.Tensor, steep: bool = True) -> Parameters:
    """Host numbers as bits; if any is an array or a tensor, all in device memory."""
    if all(isinstance(x, (int, float, np.floating)) for x in numbers):
        return Parameters(tuple(bits(float(x)) for x in numbers), (0,) * len(numbers), False, steep)
    tensors, steps = zip(*(on_device(x, like) for x in numbers), strict=True)
    return Parameters(tensors, steps, True, True)


def form_parameters(form: Form, like: torch.Tensor) -> Parameters:
    """A form's four numbers; k = p q rate stays under ½ for any rate up to 2."""
    gentle = isinstance(form.rate, (int, float)) and form.rate <= 2.0
    return parameters(tuple(form[1:]), like, steep=not gentle)


def pass_rates_tensor(p: torch.Tensor) -> torch.Tensor:
    """Pass rates as contiguous float32 or float64 [M]."""
    if p.ndim != 1:
        raise ValueError(f"pass_rates has shape {tuple(p.shape)}, not [prompts]")
    return real(p)


def _same_length(name: str, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    if x.shape != p.shape or x.device != p.device:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} on {x.device}, pass_rates {tuple(p.shape)} on {p.device}"
        )
    return x.contiguous()


@beside_its_tensors
def log_density(p: torch.Tensor, alpha: Any, beta: Any) -> torch.Tensor:
    """(α-1) ln p + (β-1) ln(1-p) - ln B(α, β): the Beta log-density (2602.03048 eq. 5).

    p: float32 or float64 [M]. alpha, beta: numbers, or tensors of one number or [M]. Result: like p. Within 1e-12
    (float64) and 1e-6 (float32) of the exact value relative to max(1, |value|), for α, β in [1, 1000] and p from 1e-30.
    NaN outside [0, 1].
    """
    from coba_core.values import log_beta as host_log_beta

    p = pass_rates_tensor(p)
    out = torch.empty_like(p)
    given = parameters((alpha, beta), p)
    scale = 0 if given.device else bits(float(host_log_beta(float(alpha), float(beta))))
    block = 256 if given.device else BLOCK  # ln B a prompt takes many registers
    if p.numel():
        log_density_kernel[(triton.cdiv(p.numel(), block),)](
            p, *given.values, *given.steps, scale, out, p.numel(), DEVICE=given.device, BLOCK=block
        )
    return out


@beside_its_tensors
def saturation(p: torch.Tensor, form: Form, budgets: torch.Tensor) -> torch.Tensor:
    """s(B, p) of the form's saturation, [M], like p."""
    p = pass_rates_tensor(p)
    budgets = _same_length("budgets", budgets, p)
    out = torch.empty_like(p)
    given = parameters((form.rate,), p)
    if p.numel():
        saturation_kernel[(triton.cdiv(p.numel(), BLOCK),)](
            p, budgets, *given.values, *given.steps, out, p.numel(),
            SATURATION=form.saturation, DEVICE=given.device, BLOCK=BLOCK,
        )  # fmt: skip
    return out


@beside_its_tensors
def _gains(p: torch.Tensor, form: Form, budgets: torch.Tensor, logs: bool, plain: bool) -> tuple[torch.Tensor, ...]:
    p = pass_rates_tensor(p)
    budgets = _same_length("budgets", budgets, p)
    outs = tuple(torch.empty_like(p) if wanted else p for wanted in (logs, plain))
    given = form_parameters(form, p)
    if p.numel():
        gains_kernel[(triton.cdiv(p.numel(), BLOCK),)](
            p, budgets, *given.values, *given.steps, *outs, p.numel(),
            SATURATION=form.saturation, DEVICE=given.device, STEEP=given.steep, LOGS=logs, GAINS=plain, BLOCK=BLOCK,
        )  # fmt: skip
    return outs


def log_gains(p: torch.Tensor, form: Form, budgets: torch.Tensor) -> torch.Tensor:
    """Log gain of one more rollout for each prompt, [M], like p. The form's numbers may be tensors on the card."""
    return _gains(p, form, budgets, True, False)[0]


def gains(p: torch.Tensor, form: Form, budgets: torch.Tensor) -> torch.Tensor:
    """Gain of one more rollout for each prompt, [M]: V(B+1) - V(B) without the cancellation."""
    return _gains(p, form, budgets, False, True)[1]


def log_gains_and_gains(p: torch.Tensor, form: Form, budgets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in one pass over the pass rates."""
    log_out, out = _gains(p, form, budgets, True, True)
    return log_out, out


@beside_its_tensors
def capability_form(alpha: Any, beta: Any, tau: Any, like: torch.Tensor) -> Form:
    """The form of CapabilityValue(α, β, τ) with its numbers on the card: each one number, or one a prompt of `like`."""
    given = [on_device(x, like) for x in (alpha, beta, tau)]
    size = max(x.numel() for x, _ in given)
    numbers = torch.empty((4, size), dtype=torch.float64, device=like.device)
    beta_form_kernel[(triton.cdiv(size, 256),)](
        *(x for x, _ in given), *(step for _, step in given), *numbers, size, BLOCK=256
    )
    return Form(reference.EXPONENTIAL, *numbers)
