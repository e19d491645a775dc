# The allocator benchmark against SGLang 0.5.23 on a CPU, in an environment of its own (about 2.2 GB, 2 to 4 minutes).

PYTHON ?= python3
SGLANG_VENV ?= .venv-sglang
BENCH_ALLOC_ARGS ?=

$(SGLANG_VENV)/.ready: benchmarks/sglang-requirements.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/pip install -q torch==2.13.0
	$(SGLANG_VENV)/bin/pip install -q -r benchmarks/sglang-requirements.txt
	$(SGLANG_VENV)/bin/pip install -q --no-deps triton==3.7.1
	$(SGLANG_VENV)/bin/pip install -q --no-deps torchvision==0.28.0
	$(SGLANG_VENV)/bin/pip install -q --no-deps sglang==0.5.23
	touch $@

.PHONY: bench-alloc
bench-alloc: $(SGLANG_VENV)/.ready  ## our allocator against SGLang's DSV4 NPU allocator on a CPU
	$(SGLANG_VENV)/bin/pip install -q --no-deps --no-build-isolation --force-reinstall .
	$(SGLANG_VENV)/bin/python -W ignore benchmarks/alloc_vs_sglang.py $(BENCH_ALLOC_ARGS)
