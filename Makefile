# make demo | test | bench | results | results-train | check | clean
# Each target first brings .venv up to date, which takes seconds when nothing has changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# FAISS and ONNX Runtime come in a CPU and a GPU build that exclude each other.
EXTRA  := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
OTHER  := $(if $(filter gpu,$(EXTRA)),faiss-cpu onnxruntime,faiss-gpu onnxruntime-gpu)

# With a C++ compiler and Python's headers at hand a failing build of the extension is an error; without
# them it is a notice.
HEADER := import os, sysconfig; print(os.path.join(sysconfig.get_path("include"), "Python.h"))
export PEAKSIM_NATIVE := $(shell command -v $(CXX) >/dev/null 2>&1 && test -e "$$($(PYTHON) -c '$(HEADER)')" \
    && echo required || echo optional)

# What decides whether something is to be done: the requirements, and the sources of the extension.
INSTALLED := $(VENV)/installed-$(EXTRA)
BUILT     := $(VENV)/built
NATIVE    := $(shell find csrc -type f -name '*.?pp' 2>/dev/null) setup.py

.PHONY: setup demo test bench results results-train check clean
.DELETE_ON_ERROR:

setup: $(BUILT)

demo: setup
	$(BIN)/peaksim demo

test: setup
	$(BIN)/python -m pytest -q tests

bench: setup
	$(BIN)/python -m pytest -q bench

# Measures the committed model and heads into RESULTS.md.
results: setup
	$(BIN)/peaksim results

# The same after training every head from scratch; a stopped training goes on.
results-train: setup
	$(BIN)/peaksim results --train

check: setup
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q tests/test_layering.py
	$(BIN)/peaksim results --quick
	$(BIN)/python -m bench.offline_compile
	$(BIN)/python bench/wheel_check.py

clean:
	rm -rf build dist peaksim.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo
	rm -f engine/_C.*.so $(BUILT)

# Tools of the build first: the package is installed without build isolation, so that they are those of
# constraints.txt. The extension is left to the next rule, which recompiles no more than what has changed.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(PIP) install -q -c constraints.txt pip setuptools wheel pybind11
	test ! -e $(VENV)/installed-$(if $(filter gpu,$(EXTRA)),cpu,gpu) || $(PIP) uninstall -q -y $(OTHER)
	rm -f $(VENV)/installed-*
	$(PIP) install -q -c constraints.txt torch torchvision
	PEAKSIM_NATIVE=skip PYTHONWARNINGS=ignore $(PIP) install -q -c constraints.txt --no-build-isolation -e ".[$(EXTRA),dev]"
	touch $@

$(BUILT): $(INSTALLED) $(NATIVE)
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@
