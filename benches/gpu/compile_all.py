"""Compiles every Triton kernel × dtype for GPUs that need not be there, and prints registers and spills.

    python benches/gpu/compile_all.py [--target sm_80 sm_90 gfx942] [--kernel threshold ...]

It refuses what the interpreter lets pass. Of the kernels that decide (whose budgets equal the CPU's bit for bit) it
also checks the code: no fused multiply-add but those of a division, and no float32 arithmetic. Exit status 1 if
anything is wrong. Not to be run under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="coba-core-triton-")  # what is cached prints no registers

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coba_core.kernels import numpy_backend as reference
from coba_core.kernels import triton_backend, triton_gains, triton_groups, triton_threshold
from coba_core.kernels.triton_threshold import POINTS, PROGRAMS, STEPS, WARPS

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SATURATIONS = ("exponential", "first_success", "mixed_group", "inverse_variance")


@dataclass(frozen=True)
class Case:
    """A kernel with the types of its arguments and its constants, as a call would compile it."""

    kernel: Any
    label: str
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__).removesuffix("_kernel")

    @property
    def exact(self) -> bool:
        return self.options.get("enable_fp_fusion", True) is False


def case(kernel: Any, label: str, types: str, options: dict[str, Any] | None = None, **constants: Any) -> Case:
    """types: one a runtime argument, in order."""
    names = [name for name in kernel.arg_names if name not in constants]
    given = types.split()
    assert len(names) == len(given), f"{kernel.fn.__name__}: {names} for {given}"
    return Case(kernel, label, dict(zip(names, given, strict=True)), constants, options or {})


def cases() -> Iterator[Case]:
    """Every kernel × dtype, with the numbers of the form on the host and on the card."""
    gains, groups, cut = triton_gains, triton_groups, triton_threshold
    exact = {"num_warps": WARPS, "enable_fp_fusion": False}
    host, card, steps = "i64 i64 i64 i64 ", "*fp64 *fp64 *fp64 *fp64 ", "i32 i32 i32 i32 "
    for dtype, name in (("*fp32", "float32"), ("*fp64", "float64")):
        for device in (False, True):
            kind = f"{name} {'parameters on card' if device else 'host numbers'}"
            two = "*fp64 *fp64" if device else "i64 i64"
            yield case(
                gains.log_density_kernel, kind, f"{dtype} {two} i32 i32 i64 {dtype} i32",
                DEVICE=device, BLOCK=256 if device else gains.BLOCK,
            )  # fmt: skip
        yield case(gains.beta_form_kernel, name, f"{dtype} {dtype} {dtype} i32 i32 i32 " + card + "i32", BLOCK=256)
    for number, saturation in enumerate(SATURATIONS):
        block = cut.tile(number)
        for dtype, device, name in (
            ("*fp32", False, "float32 host numbers"),
            ("*fp64", True, "float64 numbers on card"),
        ):
            label = f"{saturation} {name}"
            form, steep = (card if device else host) + steps, device
            yield case(
                gains.saturation_kernel, label, f"{dtype} *i64 {'*fp64' if device else 'i64'} i32 {dtype} i32",
                SATURATION=number, DEVICE=device, BLOCK=gains.BLOCK,
            )  # fmt: skip
            yield case(
                gains.gains_kernel, label, f"{dtype} *i64 {form}{dtype} {dtype} i32",
                SATURATION=number, DEVICE=device, STEEP=steep, LOGS=True, GAINS=True, BLOCK=gains.BLOCK,
            )  # fmt: skip
            yield case(
                cut.threshold_kernel, label, f"{dtype} {form}*i64 *fp64 *i32 i32 i32 i32 i32 i32", exact,
                SATURATION=number, DEVICE=device, STEEP=steep, POINTS=POINTS, BLOCK=block,
            )  # fmt: skip
            yield case(
                cut.prepare_kernel, label, f"{dtype} {form}*fp64 *i64 i32 i32 i32 i32", exact,
                SATURATION=number, DEVICE=device, STEEP=steep, POINTS=POINTS, BLOCK=block,
            )  # fmt: skip
        for first in (True, False):
            yield case(
                cut.step_kernel, f"{saturation} {'first' if first else 'later'}",
                "*fp64 *i64 *i64 i32 i32 i32 i32 i32 i32 i32", exact,
                SATURATION=number, POINTS=POINTS, BLOCK=block, FIRST=first,
            )  # fmt: skip
        yield case(
            cut.close_kernel, saturation, "*fp64 *i64 *i64 *i32 i32 i32 i32 i32 i32 i32", exact,
            SATURATION=number, POINTS=POINTS, BLOCK=block,
        )  # fmt: skip
        yield case(
            cut.settle_kernel, saturation, "*fp64 *i64 *i64 i32 i32 i32 i32 i32 i32 i32", exact,
            SATURATION=number, BLOCK=block,
        )  # fmt: skip
    yield case(cut.reset_kernel, "", "*i64 *i64 i32", STEPS=STEPS, POINTS=POINTS, BLOCK=512)
    tile: dict[str, Any] = {"POINTS": POINTS, "BLOCK": cut.BLOCK}
    yield case(cut.level_kernel, "", "*fp64 *i64 *i64 *i64 i32 i32 i32 i32 i32 i32 i32", exact, **tile)
    yield case(cut.waiting_kernel, "", "*fp64 *i64 *i64 *i64 *i64 i32 i32 i32 i32 i32 i32 i32", exact, **tile)
    yield case(
        cut.share_kernel, "", "*fp64 *i64 *i64 *i64 *i64 i32 i32 i32 i32 i32 i32 i32", exact, PROGRAMS=PROGRAMS, **tile
    )
    one = {"num_warps": 1}
    yield case(groups.repeat_kernel, "", "*i64 *i64 i32 i32", BLOCK=1024)
    for dtype, name in (("*fp32", "float32"), ("*fp64", "float64")):
        for scale, number in groups.SCALES.items():
            yield case(
                groups.advantages_kernel, f"{name} {scale}", f"{dtype} *i64 *i64 *fp64 {dtype} i32 i64", one,
                SCALE=number, BLOCK=groups.GROUP_BLOCK,
            )  # fmt: skip
        yield case(
            groups.statistics_kernel, name, f"{dtype} *i64 *i64 *i64 *fp64 *fp64 i32", one, BLOCK=groups.GROUP_BLOCK
        )
        for fractional in (False, True):
            yield case(
                groups.successes_kernel, f"{name} {'fractional' if fractional else 'threshold'}",
                f"{dtype} *i64 *i64 *fp64 *i64 i32 i64", one, FRACTIONAL=fractional, BLOCK=groups.GROUP_BLOCK,
            )  # fmt: skip
    yield case(
        groups.history_update_kernel, "", "*i64 *i64 *fp64 *i64 *fp64 *i64 *i64 *fp64 *i64 i32 i32", one, WINDOW=4
    )
    yield case(
        groups.history_rates_kernel, "", "*i64 *fp64 *i64 *fp64 *i64 *fp64 *fp64 i32 i32 i64", WINDOW=4, BLOCK=256
    )
    yield case(groups.failure_rate_kernel, "", "*fp64 *i64 *fp64 *i64 i32", WINDOW=10, BLOCK=1024)
    for explore in (False, True):
        yield case(
            groups.capability_kernel, "explore first" if explore else "exploit first",
            "*fp64 *i64 *fp64 i64 i64 i64 i64 i64 i64 i64 i64", one, EXPLORE=explore, WINDOW=10, BLOCK=16,
        )  # fmt: skip


def compile_case(case: Case, target: GPUTarget) -> tuple[Any, str]:
    """(the compiled kernel, what ptxas said)."""
    signature = {**case.types, **dict.fromkeys(case.constants, "constexpr")}
    source = ASTSource(case.kernel, signature=signature, constexprs=case.constants)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        compiled = triton.compile(source, target=target, options=case.options)
    return compiled, said.getvalue()


def resources(compiled: Any, said: str) -> tuple[str, str]:
    """(registers, spilled bytes on NVIDIA or registers on AMD) a thread."""
    if "ptx" in compiled.asm:
        registers = re.search(r"Used (\d+) registers", said)
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
        return registers.group(1) if registers else "?", "+".join(spills) + " B" if spills else "?"
    text = compiled.asm["amdgcn"]
    names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    found = {name: re.search(rf"\.{name}:\s+(\d+)", text) for name in names}
    count = {name: match.group(1) if match else "?" for name, match in found.items()}
    return count["vgpr_count"], f"{count['vgpr_spill_count']} v + {count['sgpr_spill_count']} s"


def constants(case: Case) -> list[float]:
    """Numbers that a deciding kernel computes with, and must hold to the last bit."""
    found: list[float] = []
    if case.name in ("threshold", "prepare"):
        found += [reference.LN2_HIGH, reference.LN2_LOW, *(getattr(reference, f"L{i}") for i in range(1, 8))]
        if case.label.startswith("exponential"):
            found += reference.SERIES
    if case.name in ("threshold", "step", "close") and case.label.startswith("mixed_group"):
        found += [reference.LOG2_E, *reference.EXP]
    return found


def inexact(case: Case, compiled: Any) -> str | None:
    """What in the code could round otherwise than the CPU, or None."""
    for x in constants(case):
        held = [struct.pack(">d", sign * x).hex().upper() for sign in (1, -1)]
        if not any(f"0x{digits}" in compiled.asm["llir"] for digits in held):
            return f"{x} is not in the code"
    if "ptx" in compiled.asm:
        operation = r"^\s+(?:@!?%p\d+ )?((?:fma|mad)\S*f64|[a-z]+\S*\.f32\S*)\s"
        code = re.findall(operation, compiled.asm["ptx"], re.MULTILINE)
        # pass rates that come as float32 are widened and compared, both exactly
        code = [x for x in code if x != "cvt.f64.f32" and not x.startswith("setp")]
        return f"{len(code)} × {code[0]}" if code else None
    fused = len(re.findall(r"\bv_fma(?:c|mk|ak)?_f64", compiled.asm["amdgcn"]))
    divisions = len(re.findall(r"\bv_div_fixup_f64", compiled.asm["amdgcn"]))  # correctly rounded, by five of them
    integers = len(re.findall(r"\bv_cvt_u32_f64", compiled.asm["amdgcn"]))  # to 64 bits, exactly, by one
    if fused == 5 * divisions + integers:
        return None
    return f"{fused} v_fma_f64, {divisions} divisions, {integers} to int64"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compile every Triton kernel ahead of time")
    parser.add_argument("--target", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--kernel", nargs="+", help="only these, by name without _kernel")
    options = parser.parse_args(arguments)
    if triton_backend.INTERPRETED:
        print("TRITON_INTERPRET is set: nothing can be compiled in this process", file=sys.stderr)
        return 2
    triton.knobs.nvidia.dump_ptxas_log = True
    failures = 0
    start = time.perf_counter()
    print(f"triton {triton.__version__}")
    print(f"{'target':8} {'kernel':16} {'case':46} {'registers':>9}  spills")
    chosen = [c for c in cases() if options.kernel is None or c.name in options.kernel]
    for target in options.target:
        for case in chosen:
            try:
                compiled, said = compile_case(case, TARGETS[target])
            except Exception as error:
                failures += 1
                print(f"{target:8} {case.name:16} {case.label:46} REFUSED: {error}")
                continue
            registers, spills = resources(compiled, said)
            wrong = inexact(case, compiled) if case.exact else None
            failures += wrong is not None
            note = f"  INEXACT: {wrong}" if wrong else ""
            print(f"{target:8} {case.name:16} {case.label:46} {registers:>9}  {spills}{note}")
    print(f"{len(chosen) * len(options.target)} compiled in {time.perf_counter() - start:.0f} s, {failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
