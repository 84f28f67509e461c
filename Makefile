# `make train` and `make test` do everything from a fresh checkout: system packages, .venv, PyTorch, extensions.
# Each stage leaves a stamp, so that a second call is quick and a changed source repeats only what it must.
#
#   PYTHON=python3.12       the interpreter that .venv is made with
#   TORCH="torch==2.13.0"   the PyTorch to install; one in .venv that satisfies it is kept
#   TRAIN="--steps 20"      more options for `make train`; TESTS="-k chunks" for the tests
#   JOBS=8                  tests that run side by side

PYTHON ?= python3
TORCH ?= torch>=2.8
TRAIN ?=
TESTS ?=
JOBS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
C_SOURCES := $(wildcard infinity/*.c infinity/*.h aio_ext/*.c aio_ext/*.h)
C_TESTS := $(wildcard tests/test_aio*.py tests/test_adam*.py tests/test_crc32c.py tests/test_compressor.py)

.PHONY: train test test-long test-gpu bench sanitize build clean
.DELETE_ON_ERROR:

# Every state lives in ./infinity-swap: ten times the device budget, four times the host budget.
train: build
	$(PY) -m infinity train --weights nvme --states nvme --device-memory 12MiB --host-memory 32MiB $(TRAIN)

test: build
	$(PY) -m pytest -n $(JOBS) $(TESTS)

test-long: build
	$(PY) -m pytest -n $(JOBS) -m long $(TESTS)

test-gpu: build
	$(PY) -m pytest -m gpu $(TESTS)

bench: build
	$(PY) -m bench all

# The extensions' tests on an ASan and UBSan build, which is then built away again.
sanitize: build
	rm -f build/.extensions
	INFINITY_SANITIZE=1 $(PY) setup.py --quiet build_ext --inplace --force
	LD_PRELOAD=$$($(CC) -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 $(PY) -m pytest $(C_TESTS) $(TESTS); \
	status=$$?; $(PY) setup.py --quiet build_ext --inplace --force && touch build/.extensions; exit $$status

clean:
	rm -rf build *.egg-info infinity-swap .pytest_cache
	rm -f infinity/*.so aio_ext/*.so
	find infinity aio_ext tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

build: build/.extensions

build/.extensions: $(VENV)/.packages $(C_SOURCES) setup.py
	$(PY) setup.py --quiet build_ext --inplace
	@touch $@

# PyTorch goes first, so that the requirement of the package is then already met. Its setuptools serves both builds.
$(VENV)/.packages: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check "setuptools>=77" "$(TORCH)"
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[test]"
	@touch $@

$(PY): | build/.prerequisites
	$(PYTHON) -m venv $(VENV)

# What pip cannot bring. Installed with apt where that needs no password, else named.
build/.prerequisites:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "infinity needs Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@missing=""; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	$(PYTHON) -c 'import os, sysconfig as s; os.stat(os.path.join(s.get_path("include"), "Python.h"))' 2>/dev/null \
	  || missing="$$missing python3-dev"; \
	echo '#include <stdio.h>' | $(CC) -fsyntax-only -x c - 2>/dev/null || missing="$$missing gcc libc6-dev"; \
	echo '#include <libaio.h>' | $(CC) -fsyntax-only -x c - 2>/dev/null || missing="$$missing libaio-dev"; \
	if [ -n "$$missing" ]; then \
	  if ! command -v apt-get >/dev/null; then apt=""; \
	  elif [ "$$(id -u)" = 0 ]; then apt="env DEBIAN_FRONTEND=noninteractive apt-get"; \
	  elif sudo -n true 2>/dev/null; then apt="sudo -n env DEBIAN_FRONTEND=noninteractive apt-get"; \
	  else apt=""; fi; \
	  if [ -z "$$apt" ]; then \
	    echo "infinity needs packages that only root can install. On Debian or Ubuntu:" >&2; \
	    echo "  sudo apt-get install$$missing" >&2; exit 1; \
	  fi; \
	  echo "installing:$$missing"; \
	  $$apt update -qq && $$apt install -qq -y --no-install-recommends $$missing; \
	fi
	@mkdir -p build && touch $@
