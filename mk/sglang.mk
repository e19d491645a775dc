# make sglang-test   the drop-in inside SGLang 0.5.23 on a CPU: selection, traps, adapters, its real engine
#
# Uses the environment of bench-alloc (bench.mk; about 2.2 GB, 2 to 4 minutes) and adds what tests need.

SGLANG_PY := $(SGLANG_VENV)/bin/python
SGLANG_TEST_ARGS ?=

$(SGLANG_VENV)/.tests: $(SGLANG_VENV)/.ready packaging/torchvision_on_cpu.py mk/sglang.mk
	$(SGLANG_PY) -m pip install -q --no-deps xgrammar==0.2.7
	$(SGLANG_PY) -m pip install -q 'rich>=13' 'pytest>=8' 'hypothesis>=6.100' datasets
	$(SGLANG_PY) -m pip download -q --no-deps sglang==0.5.22 -d out  # the older release, for one test
	@site=$$($(SGLANG_PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  cp packaging/torchvision_on_cpu.py $$site/_torchvision_on_cpu.py && \
	  echo 'import _torchvision_on_cpu' > $$site/_torchvision_on_cpu.pth
	touch $@

$(SGLANG_VENV)/.package: $(SGLANG_VENV)/.tests $(NATIVE) pyproject.toml packaging/emulated/pyproject.toml
	PATH="$(abspath $(SGLANG_VENV))/bin:$$PATH" $(SGLANG_PY) -m pip install -q --no-deps --no-build-isolation -e .
	$(SGLANG_PY) -m pip install -q --no-deps --no-build-isolation ./packaging/emulated
	touch $@

.PHONY: sglang-test
sglang-test: $(SGLANG_VENV)/.package
	$(SGLANG_PY) -W ignore -m pytest tests/sglang $(SGLANG_TEST_ARGS)

SGLANG_DEMO_ARGS ?=

.PHONY: sglang-demo
sglang-demo: $(SGLANG_VENV)/.package  ## SGLang's real engine over our memory on a CPU, compared with Hugging Face
	SGLANG_PLATFORM=dsv4_npu_emulated $(SGLANG_PY) -W ignore -m dsv4_npu.sglang.demo $(SGLANG_DEMO_ARGS)

BENCH_SGLANG_ARGS ?=

.PHONY: bench-sglang
bench-sglang: $(SGLANG_VENV)/.package  ## SGLang's calls on its own memory classes and on ours
	$(SGLANG_PY) -W ignore benchmarks/sglang_calls.py $(BENCH_SGLANG_ARGS)

.PHONY: sglang-demo-npu
sglang-demo-npu: $(SGLANG_VENV)/.package  ## the same on the emulated npu device: SGLang's NPU branches
	SGLANG_PLATFORM=dsv4_npu $(SGLANG_PY) -W ignore -m dsv4_npu.sglang.demo --device npu $(SGLANG_DEMO_ARGS)
