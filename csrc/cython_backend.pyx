# distutils: language = c
# cython: freethreading_compatible = True
"""The compiled kernels: numpy_backend.py's functions, for the best instruction set of this processor.

``COBA_CORE_CPU=baseline|avx2|avx512`` forces one; `target` says which one runs.

Calls share nothing that they write to, and run without the GIL: any number of threads may call at once, as long as
none of them calls `use`.
"""

import os

import numpy as np

from coba_core.kernels.numpy_backend import Form
from libc.stdint cimport int64_t


cdef extern from "kernels.h":
    enum: TABLE
    ctypedef struct coba_gains:
        int saturation
        int64_t prompts
        const double *p
        const double *p_exponent
        const double *q_exponent
        const double *log_scale
        const double *rate
        int64_t p_step, q_step, scale_step, rate_step
        const double *table
        int64_t width
    ctypedef struct coba_kernels:
        const char *name
        int64_t (*first_invalid)(const double *, int64_t) noexcept nogil
        int (*log_gains)(const coba_gains *, const int64_t *, double *, int) noexcept nogil
        int (*log_gain_table)(const coba_gains *, int64_t, int64_t, double *) noexcept nogil
        int (*heap)(const coba_gains *, int64_t, int64_t, int64_t, int64_t *) noexcept nogil
        int (*threshold)(const coba_gains *, int64_t, int64_t, int64_t, int64_t *, int) noexcept nogil
    const coba_kernels *coba_select(const char *) noexcept nogil


cdef const coba_kernels *kernels
cdef object empty = np.empty, integers = np.dtype(np.int64), form_type = Form  # looked up once: calls take microseconds


def use(name=None):
    """Chooses the instruction set: None for the best, or a name; ValueError if this processor lacks it."""
    global kernels, target
    cdef bytes text = b"" if name is None else name.encode()
    cdef const coba_kernels *chosen = coba_select(NULL if name is None else <const char *>text)
    if chosen is NULL:
        raise ValueError(f"COBA_CORE_CPU is {name!r}, not one that this processor and build have")
    kernels = chosen
    target = chosen.name.decode()


use(os.environ.get("COBA_CORE_CPU") or None)


cdef class _Gains:
    """A coba_gains and the arrays that it points into."""

    cdef coba_gains c
    cdef double[4] scalars
    cdef object keep

    cdef const double *parameter(self, object x, int place, int64_t *step):
        cdef const double[::1] view
        if isinstance(x, float):
            self.scalars[place] = x
            step[0] = 0
            return &self.scalars[place]
        array = np.ascontiguousarray(x, dtype=np.float64).reshape(-1)
        view = array
        step[0] = 0 if len(array) == 1 else 1
        if step[0] and view.shape[0] != self.c.prompts:
            raise ValueError(f"a parameter has {view.shape[0]} numbers for {self.c.prompts} prompts")
        self.keep = (self.keep, array)
        return &view[0] if view.shape[0] else NULL


cdef _Gains _gains(const double[::1] p, object source):
    cdef _Gains g = _Gains.__new__(_Gains)
    cdef const double[:, ::1] table
    g.c.prompts = p.shape[0]
    g.c.p = &p[0] if p.shape[0] else NULL
    g.keep = source
    if isinstance(source, form_type):
        g.c.saturation = source[0]
        g.c.p_exponent = g.parameter(source[1], 0, &g.c.p_step)
        g.c.q_exponent = g.parameter(source[2], 1, &g.c.q_step)
        g.c.log_scale = g.parameter(source[3], 2, &g.c.scale_step)
        g.c.rate = g.parameter(source[4], 3, &g.c.rate_step)
    else:
        table = source
        if table.shape[0] != p.shape[0]:
            raise ValueError(f"the table has {table.shape[0]} rows for {p.shape[0]} prompts")
        g.c.saturation = TABLE
        g.c.table = &table[0, 0] if p.shape[0] and table.shape[1] else NULL
        g.c.width = table.shape[1]
    return g


cdef int _check(_Gains g, int64_t low, int64_t high, int64_t total) except -1:
    """What a solver relies on to stay inside its arrays; `allocate` has said it better before."""
    cdef int64_t prompts = g.c.prompts
    if not (0 <= low <= high < 2147483647 and prompts < 2147483647 and prompts * low <= total <= prompts * high):
        raise ValueError(f"total is {total}: not one of {prompts} prompts with budgets in [{low}, {high}]")
    if g.c.saturation == TABLE and g.c.width < high:
        raise ValueError(f"the table has {g.c.width} columns for budgets up to {high}")
    return 0


cdef object _done(int code, object result):
    if code:
        raise MemoryError("the kernel's work arrays do not fit in memory")
    return result


cdef object _batch(const double[::1] p, object form, const int64_t[::1] budgets, int exponentiate):
    cdef _Gains g = _gains(p, form)
    result = np.empty(p.shape[0])
    cdef double[::1] out = result
    cdef int code = 0
    if budgets.shape[0] != p.shape[0]:
        raise ValueError(f"budgets has {budgets.shape[0]} numbers for {p.shape[0]} prompts")
    if p.shape[0]:
        with nogil:
            code = kernels.log_gains(&g.c, &budgets[0], &out[0], exponentiate)
    return _done(code, result)


def first_invalid(const double[::1] p):
    """Index of the first pass rate that is NaN or outside [0, 1]; -1 if there is none."""
    cdef int64_t index = -1
    if p.shape[0]:
        with nogil:
            index = kernels.first_invalid(&p[0], p.shape[0])
    return index


def log_gains(const double[::1] p, object form, const int64_t[::1] budgets):
    """Log gain of one more rollout for each prompt, [M]."""
    return _batch(p, form, budgets, 0)


def gains(const double[::1] p, object form, const int64_t[::1] budgets):
    """Gain of one more rollout for each prompt, [M]."""
    return _batch(p, form, budgets, 1)


def log_gain_table(const double[::1] p, object form, int64_t low, int64_t high):
    """Log gains at budgets low .. high-1, [M, high-low]."""
    cdef _Gains g = _gains(p, form)
    if high < low:
        raise ValueError(f"low is {low}, above high, which is {high}")
    result = np.empty((p.shape[0], high - low))
    cdef double[:, ::1] out = result
    cdef int code = 0
    if p.shape[0] and high > low:
        with nogil:
            code = kernels.log_gain_table(&g.c, low, high, &out[0, 0])
    return _done(code, result)


def heap(const double[::1] p, object source, int64_t low, int64_t high, int64_t total):
    """2602.03048 Algorithm 1 on log gains, [M]."""
    cdef _Gains g = _gains(p, source)
    _check(g, low, high, total)
    result = empty(p.shape[0], integers)
    cdef int64_t[::1] budgets = result
    cdef int code = 0
    if p.shape[0]:
        with nogil:
            code = kernels.heap(&g.c, low, high, total, &budgets[0])
    return _done(code, result)


def threshold(const double[::1] p, object source, int64_t low, int64_t high, int64_t total, int threads=1):
    """Every unit above the cut, then ties in the canonical order, [M]."""
    cdef _Gains g = _gains(p, source)
    _check(g, low, high, total)
    if threads < 1:
        raise ValueError(f"threads is {threads}, not at least 1")
    result = empty(p.shape[0], integers)
    cdef int64_t[::1] budgets = result
    cdef int code = 0
    if p.shape[0]:
        with nogil:
            code = kernels.threshold(&g.c, low, high, total, &budgets[0], threads)
    return _done(code, result)
