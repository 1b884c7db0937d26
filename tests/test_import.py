"""What `import coba_core` brings in, and what it does not."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys

import coba_core

HEAVY = ("numba", "llvmlite", "torch", "triton", "transformers", "scipy", "pandas", "matplotlib", "yaml", "hypothesis")


def output(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_heavy_is_imported() -> None:
    modules = f"sorted({{m.partition('.')[0] for m in sys.modules}} & set({HEAVY}))"
    assert output(f"import sys, coba_core; print({modules})") == "[]"
    calls = "coba_core.allocate([.1, .5], 8); coba_core.group_advantages([1, 0], [0, 0])"
    code = f"import sys, coba_core; {calls}; print({modules})"
    if coba_core.kernels.available()["cython"][0]:
        assert output(code) == "[]"


def test_an_import_opens_no_connection() -> None:
    code = (
        "import sys; seen = []\n"
        "sys.addaudithook(lambda event, _: seen.append(event) if event.startswith(('socket.', 'urllib.')) else None)\n"
        "import coba_core, coba_core.cli; coba_core.allocate([.1, .5], 8); print(seen)\n"
        "import socket; socket.socket().close(); assert seen"  # it would have been seen
    )
    assert output(code) == "[]"


def test_every_public_name_is_there_and_documented() -> None:
    assert set(coba_core.__all__) <= set(dir(coba_core))
    for name in coba_core.__all__:
        thing = getattr(coba_core, name)
        assert thing.__doc__, name
        assert thing.__module__.startswith("coba_core."), name


def test_types_are_published() -> None:
    assert importlib.resources.files("coba_core").joinpath("py.typed").is_file()


def test_version() -> None:
    assert importlib.metadata.version("coba-core") == coba_core.__version__


def test_submodule_and_function_share_a_name() -> None:
    assert output("import coba_core.allocate; print(coba_core.allocate([0.5, 0.5], 8).tolist())") == "[4, 4]"
    assert output("from coba_core.allocate import allocate; print(allocate([0.5, 0.5], 8).tolist())") == "[4, 4]"
