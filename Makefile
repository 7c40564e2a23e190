# Two commands: `make demo` and `make test`. Each makes .venv, installs what is pinned in constraints.txt, fetches and
# starts what it needs, and cleans up after itself.

PYTHON ?= python3
BIN := .venv/bin
# What the demo needs, and what the tests need as well.
LOCAL := .venv/.installed-local
INSTALLED := .venv/.installed
RELEASE := .venv/.installed-release

.PHONY: demo test test-all nightly older-kafka up docs release pictures lint fast warm soak chaos replicas migrations trust picker-kills real lmcache conformance witness fuzz-events fuzz-picker bench bench-stream bench-http calibrate clean

demo: $(LOCAL)
	$(BIN)/kvstreams demo

up: $(LOCAL)
	$(BIN)/kvstreams up

# The first ring of tests (CONTRIBUTING.md), in at most 12 minutes on a new machine with two cores. The types are checked
# while the kernels are compiled.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs=2 lint warm
	$(call pytest,--fast)

# Every test, with all generated examples.
test-all: lint warm $(RELEASE)
	$(call pytest)

# Every test, and what takes hours. It fails as long as tests are listed that passed only alone.
nightly: test-all older-kafka real lmcache trust chaos replicas soak migrations fuzz-picker picker-kills
	$(BIN)/python -m tests.rerun --listed

# Up to five tests that fail next to others are run once more alone, and listed. Failures of former runs do not count.
pytest = $(BIN)/pytest --cache-clear $(1) || { [ $$? -eq 1 ] && $(BIN)/python -m tests.rerun; }

# The documentation as a site, in build/site. Open build/site/index.html; no server and no network is needed to read it.
docs: $(INSTALLED)
	$(BIN)/python -m tools.site

# The files of a release, in dist: wheel, sdist, SBOM, licence notices and checksums, all from the commit.
release: $(RELEASE)
	$(BIN)/python -m tools.release dist

$(RELEASE): $(INSTALLED)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[release]'
	@touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports

# The part of the first ring that starts no server and no Kafka: less than a minute on two cores. One test:
# .venv/bin/pytest -n 0 tests/unit/test_hashing.py -k golden
fast: warm
	$(BIN)/pytest --fast --numprocesses logical tests/unit

# The kernels are compiled before tests, because otherwise each of four test processes would compile them.
warm: $(INSTALLED)
	@$(BIN)/kvstreams warm

# Ten million operations on every index compared with the reference: about 50 minutes.
soak: warm
	$(BIN)/python -m tests.soak --operations 10000000

# 200,000 damaged event messages of every dialect: about 2 minutes.
fuzz-events: warm
	$(BIN)/python -m tests.event_fuzz_soak

# 100,000 malformed or hostile streams of gateways to an endpoint picker: about 5 minutes.
fuzz-picker: warm
	$(BIN)/python -m tests.picker_fuzz_soak

# A real Kafka, 100,000 records, and workers that are killed at every effect; then three brokers, and every process of a
# fleet is killed and paused for ten minutes: about 25 minutes.
chaos: warm
	$(BIN)/python -m tests.chaos
	$(BIN)/python -m tests.engine_restarts
	$(BIN)/python -m tests.cluster_chaos

# Three routers on a real Kafka, 5,000 bookings; one is killed, Kafka stops for 20 s, one starts late: about 5 minutes.
replicas: warm
	$(BIN)/python -m tests.replicas --mode kv
	$(BIN)/python -m tests.replicas --mode expected-time

# The tests on Kafka, and the programs that kill workers and engines, on the oldest Kafka that they run on.
older-kafka: warm
	KVSTREAMS_TEST_KAFKA_VERSION=4.1.1 $(BIN)/pytest tests/kafka tests/trust
	KVSTREAMS_TEST_KAFKA_VERSION=4.1.1 $(BIN)/python -m tests.chaos
	KVSTREAMS_TEST_KAFKA_VERSION=4.1.1 $(BIN)/python -m tests.engine_restarts

# 1,000 streams whose engines are killed, stall or refuse at random, with real processes: about ten minutes.
migrations: warm
	$(BIN)/python -m tests.migrations $(MIGRATIONS)

# Three pickers behind a real Envoy, 100 requests/s, one killed every 10 s for five minutes, and the table of failures of
# docs/gateway.md: about 20 minutes on a machine that runs nothing else.
picker-kills: warm
	$(BIN)/pytest --long --numprocesses 0 -s tests/kafka/test_picker_kills.py
	$(BIN)/python -m tests.picker_failures

# Every way in which a router's knowledge can be wrong (docs/trust.md), in the long form, with real processes.
trust: warm
	$(BIN)/pytest --long tests/trust

# Real vLLM engines without a GPU, in .venv-vllm (6 GB): single cases, a thousand promises, a hundred failures, vLLM's
# own load generator, and a soak with random faults: about two hours. It says so and goes on where the wheels cannot be
# installed.
REAL := $(CURDIR)/.venv-vllm
real: warm
	@$(BIN)/python -m tests.real.environment $(REAL) || echo "make real: vLLM cannot be installed here, so nothing of it is tested"
	KVSTREAMS_REAL_VLLM=$(REAL) $(BIN)/pytest --numprocesses 0 -rs tests/real
	[ ! -x $(REAL)/bin/vllm ] || KVSTREAMS_REAL_VLLM=$(REAL) $(BIN)/python -m tests.real.agreement
	[ ! -x $(REAL)/bin/vllm ] || KVSTREAMS_REAL_VLLM=$(REAL) $(BIN)/python -m tests.real.failures
	[ ! -x $(REAL)/bin/vllm ] || KVSTREAMS_REAL_VLLM=$(REAL) $(BIN)/python -m tests.real.bench_serve
	[ ! -x $(REAL)/bin/vllm ] || KVSTREAMS_REAL_VLLM=$(REAL) $(BIN)/python -m tests.trust_soak --real 2 --minutes 36

# 100,000 random events of LMCache's own classes, and bridges that are killed: about 45 minutes. LMCACHE is a Python that has
# lmcache 0.5.6, as that of `make real` has; without one, the test says that it is skipped.
LMCACHE = $(REAL)/bin/python
lmcache: warm
	KVSTREAMS_REAL_LMCACHE=$(LMCACHE) $(BIN)/pytest --long --numprocesses 0 -s -rs tests/kafka/test_lmcache.py -k real_lmcache

conformance: warm
	$(BIN)/python -m tests.conformance tests/conformance_cases.jsonl $(CASES)

# The newest wheels of vLLM and SGLang: what changed in their event classes, and whether this project reads them. It
# downloads some hundred megabytes, and no test needs it.
witness: $(INSTALLED)
	$(BIN)/python -m tests.witness

# The index compared with others, which are built if cargo is installed. BENCH="--quick" runs a smoke test.
bench: warm
	$(BIN)/python -m benchmarks.index $(BENCH)

# The time from an event to a router, recovery and failover, on a real Kafka with real processes: about twelve minutes on a
# machine that runs nothing else.
bench-stream: warm
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.failover
	$(BIN)/python -m benchmarks.bridge
	$(BIN)/python -m benchmarks.lmcache

# Decisions and bookings over HTTP, next to Dynamo's selection service if .venv-dynamo has it (benchmarks/http.py says how to
# install it there): about ten minutes on a machine that runs nothing else. BENCH="--quick" runs a smoke test.
bench-http: warm
	$(BIN)/python -m benchmarks.http $(BENCH)

# The laboratory next to NVIDIA Dynamo's replay of a trace: TRACE=conversation_trace.jsonl, and DYNAMO=a Python that has
# Dynamo (benchmarks/calibrate.py says how to install it). Without DYNAMO, stored figures are used; without TRACE, a small
# generated one.
calibrate: warm
	$(BIN)/python -m benchmarks.calibrate $(TRACE) $(if $(DYNAMO),--dynamo $(DYNAMO))

# The pictures of the docs: pages of a router whose fleet is well, and the plot of the demo. About eight minutes on a machine
# that runs nothing else; it fails if the fleet is not well.
pictures: warm
	$(BIN)/python -m tools.pictures

clean:
	-[ ! -x $(BIN)/kvstreams ] || $(BIN)/kvstreams kafka down
	rm -rf .venv .kvstreams

# The stamp is written last, so that an interrupted installation is repeated. dev includes all of local.
$(LOCAL): EXTRA := local
$(INSTALLED): EXTRA := dev
$(LOCAL) $(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvstreams needs Python 3.11 or newer; set PYTHON to one, as in: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "installing kvstreams[$(EXTRA)] into .venv, once"
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 $(PYTHON) tools/install.py .venv '.[$(EXTRA)]'
	@touch $(LOCAL) $@
