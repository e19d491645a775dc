# make ascend      prove the Triton kernels whose sources changed for Ascend A2, A3 and A5 (docs/ascend.md)
# make ascend-all  prove all of them
# make ascend-test the tests of the proofs themselves

ASCEND_PYTHON := .venv-ascend/bin/python
ASCEND_LLVM := /usr/lib/llvm-19
ASCEND_DEBIAN := llvm-19 mlir-19-tools libmlir-19
PYTHON ?= python3

.PHONY: ascend ascend-all ascend-test ascend-tools

ascend: .venv-ascend/ready ascend-tools
	$(ASCEND_PYTHON) -m tests.ascend.run

ascend-all: .venv-ascend/ready ascend-tools
	$(ASCEND_PYTHON) -m tests.ascend.run --all

ascend-test: .venv-ascend/ready ascend-tools
	$(ASCEND_PYTHON) -m pytest -q --confcutdir tests/ascend tests/ascend

# triton-ascend installs a package named triton, hence an environment of its own.
.venv-ascend/ready: tests/ascend/requirements.txt
	$(PYTHON) -m venv .venv-ascend
	@$(ASCEND_PYTHON) -m pip install -qq --disable-pip-version-check -r $< || \
	  { echo "make ascend: pip could not install tests/ascend/requirements.txt (needs Python 3.9 to 3.11 on x86-64 Linux)"; exit 1; }
	@touch $@

ascend-tools:
	@if [ -x $(ASCEND_LLVM)/bin/mlir-opt ] && [ -x $(ASCEND_LLVM)/bin/opt ] && [ -e $(ASCEND_LLVM)/lib/libmlir_c_runner_utils.so.19.1 ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(ASCEND_DEBIAN) > /dev/null || \
	  { echo "make ascend: apt-get could not install $(ASCEND_DEBIAN)"; exit 1; }; \
	else echo "make ascend: install Debian's $(ASCEND_DEBIAN) first (as root: apt-get install $(ASCEND_DEBIAN))"; exit 1; fi
