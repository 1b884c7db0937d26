#!/usr/bin/env bash
# The compiled kernels under AddressSanitizer and UndefinedBehaviorSanitizer, then in valgrind's memcheck, by a build of
# their own in build/sanitize: `make sanitize`. Needs GCC and valgrind; PYTHON names the interpreter.
#
#   tests/sanitize/run.sh [asan] [valgrind]     one of the two; both if none is named
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
WORK=build/sanitize
parts=${*:-asan valgrind}

# A tree of its own, in which coba_core.integrations is a folder; the extension is built there with the given flags.
build() {
    local tree=$WORK/$1
    rm -rf "$tree" && mkdir -p "$tree"
    cp -r setup.py pyproject.toml README.md LICENSE conftest.py csrc coba_core integrations tests "$tree"
    cp -r integrations "$tree/coba_core/"
    rm -f "$tree"/coba_core/kernels/*.so "$tree/csrc/cython_backend.c"
    (cd "$tree" && CC="gcc $2" LDSHARED="gcc -shared $2" COBA_CORE_REQUIRE_EXT=1 "$PYTHON" setup.py -q build_ext --inplace)
}

export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
case " $parts " in *" asan "*)
    build asan "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
    # CPython is not built with the sanitizer, so its library comes first, and what CPython never frees is no leak here.
    export ASAN_OPTIONS=detect_leaks=0:strict_init_order=1:allocator_may_return_null=1
    export UBSAN_OPTIONS=print_stacktrace=1
    libraries="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)"
    (cd "$WORK/asan"
     export PYTHONPATH=$PWD PYTHONMALLOC=malloc
     env LD_PRELOAD="$libraries" "$PYTHON" tests/sanitize/driver.py
     env LD_PRELOAD="$libraries" "$PYTHON" -m pytest -q -p no:cacheprovider tests/kernels tests/fuzz tests/test_vectors.py \
         --ignore-glob='tests/kernels/test_triton*')
    ;;
esac
case " $parts " in *" valgrind "*)
    build valgrind "-g"
    (cd "$WORK/valgrind"
     # valgrind 3.19 has no AVX-512: its processor says so, and the kernels choose AVX2 by themselves.
     PYTHONPATH=$PWD PYTHONMALLOC=malloc valgrind --tool=memcheck --error-limit=no --num-callers=30 \
         --log-file=memcheck.log "$PYTHON" tests/sanitize/driver.py --quick
     "$PYTHON" tests/sanitize/memcheck.py memcheck.log)
    ;;
esac
