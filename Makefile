# demo and test create and use .venv by themselves; nothing outside this folder is changed.
VENV := .venv
PY := $(VENV)/bin/python
TORCH := torch==2.13.0
TRANSFORMERS := transformers==5.24.0
TRITON := triton==3.7.1
WORKERS := 2
NATIVE := setup.py CMakeLists.txt $(wildcard csrc/*/*.cpp csrc/*/*.h)

.PHONY: demo test test-slow test-hf519 lint bench clean
.DEFAULT_GOAL := demo

$(VENV)/.python: pyproject.toml
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "dsv4_npu needs Python 3.10 or newer as python3"; exit 1; }
	@python3 -m venv $(VENV) || { echo "python3 cannot make virtual environments: apt-get install python3-venv"; exit 1; }
	$(PY) -m pip install --quiet $(TORCH) 'setuptools>=69' wheel 'pybind11>=2.12' cmake ninja
	$(PY) -m pip install --quiet --no-deps $(TRITON)
	$(PY) -m pip install --quiet 'numpy>=1.26' 'rich>=13' $(TRANSFORMERS) 'pytest>=8' 'pytest-xdist>=3' \
	  'hypothesis>=6.100' 'ruff>=0.8' 'mypy>=1.13'
	@touch $@

$(VENV)/.ready: $(VENV)/.python $(NATIVE)
	@command -v c++ >/dev/null || echo "no C++ compiler: the compiled parts are left out (apt-get install g++)"
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# The main job: ten texts through a real DeepSeek-V4 implementation, speculatively, from our pools, against the oracle.
demo: $(VENV)/.ready
	$(PY) -m dsv4_npu run --platform a3 --platform a5 --spec chain --spec dspark

test: $(VENV)/.ready
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m 'not slow'

test-slow: $(VENV)/.ready
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m slow

bench: bench-alloc

lint: $(VENV)/.ready
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

# The emulation's tests again with the transformers release that SGLang 0.5.23 pins.
.venv-hf519/.ready: pyproject.toml $(NATIVE)
	python3 -m venv .venv-hf519
	.venv-hf519/bin/python -m pip install --quiet $(TORCH) 'setuptools>=69' wheel 'pybind11>=2.12' cmake ninja
	.venv-hf519/bin/python -m pip install --quiet 'numpy>=1.26' 'rich>=13' transformers==5.19.0 'pytest>=8' 'hypothesis>=6.100'
	@touch $@

test-hf519: $(VENV)/.ready .venv-hf519/.ready
	PYTHONPATH=. .venv-hf519/bin/python -m pytest tests/emulation/test_identity.py -k smoke

clean:
	rm -rf $(VENV) .venv-* build out

-include mk/*.mk
