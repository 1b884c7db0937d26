"""Builds the compiled kernels; everything else is in pyproject.toml.

Environment:
    COBA_CORE_REQUIRE_EXT=1   a failed build is an error (else the package installs without the compiled kernels)
    COBA_CORE_DEBUG=1         bounds checks, assertions, no optimisation
"""

import os
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("COBA_CORE_DEBUG") == "1"
REQUIRED = os.environ.get("COBA_CORE_REQUIRE_EXT") == "1"
# One source a target: each holds the same kernels, compiled for other instructions and chosen at import.
TARGETS = ("baseline", "avx2", "avx512")


class BuildKernels(build_ext):
    """Adds the flags that this compiler knows."""

    def build_extensions(self):
        for extension in self.extensions:
            if self.compiler.compiler_type == "msvc":
                extension.extra_compile_args = ["/O2", "/fp:precise"]
                continue
            # Every backend and instruction set must round alike: no contraction to fused multiply-add, no reordering.
            flags = ["-O0", "-g"] if DEBUG else ["-O3"]
            extension.extra_compile_args = [*flags, "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
            if self._links("-fopenmp"):
                extension.extra_compile_args.append("-fopenmp")
                extension.extra_link_args = ["-fopenmp"]
        super().build_extensions()

    def _links(self, flag):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n")
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=[flag])
                self.compiler.link_executable(objects, str(Path(folder, "probe")), extra_postargs=[flag])
            except Exception:
                return False
        return True


def extensions():
    try:
        from Cython.Build import cythonize
    except ImportError:
        if REQUIRED:
            raise
        print("coba_core: Cython is missing, the compiled kernels are left out", file=sys.stderr)
        return []
    headers = sorted(str(path) for path in Path("csrc").glob("*.h"))
    kernels = Extension(
        "coba_core.kernels.cython_backend",
        sources=["csrc/cython_backend.pyx", *(f"csrc/kernels_{target}.c" for target in TARGETS)],
        depends=headers,
    )
    directives = {"language_level": 3, "boundscheck": DEBUG, "wraparound": False, "initializedcheck": DEBUG}
    built = cythonize([kernels], compiler_directives=directives)
    for extension in built:
        extension.optional = not REQUIRED  # a failed build is then a warning, and the package falls back
    return built


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels})
