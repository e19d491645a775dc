# On a machine with a CUDA GPU, with a CUDA build of torch and with triton (GPU_PYTHON names its Python):
# make bench-kernels   every op against today's public kernels and the memory floor
# make gpu-test        the tests of the ops on that GPU, and fifty equal runs of each
# make gpu-sanitize    the same runs under compute-sanitizer: memory accesses, then races in shared memory
# Anywhere:
# make check-kernels   the benchmark's cases against ref.py, small, under Triton's interpreter where there is no GPU

GPU_PYTHON ?= python3
BENCH_KERNELS_ARGS ?=
SANITIZER := PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=. compute-sanitizer --error-exitcode 9
SANITIZED := $(GPU_PYTHON) -m pytest -q -p no:cacheprovider -m gpu $(addprefix tests/ops/test_,repeats.py launch.py calls.py)

.PHONY: bench-kernels gpu-test gpu-sanitize check-kernels

bench-kernels:
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/kernels.py $(BENCH_KERNELS_ARGS)

gpu-test:
	PYTHONPATH=. $(GPU_PYTHON) -m pytest -q -m gpu tests/ops tests/sampling tests/trees/test_gpu.py

gpu-sanitize:
	$(SANITIZER) --tool memcheck $(SANITIZED)
	$(SANITIZER) --tool racecheck $(SANITIZED)

check-kernels: $(VENV)/.ready
	$(PY) benchmarks/kernels.py --check
