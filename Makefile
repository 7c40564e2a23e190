# Two commands: `make demo` and `make test`. Each makes .venv, installs what is pinned in constraints.txt, fetches and
# starts what it needs, and cleans up behind itself.

PYTHON ?= python3
BIN := .venv/bin
# What the demo needs, and what the tests need as well.
LOCAL := .venv/.installed-local
INSTALLED := .venv/.installed

.PHONY: demo test up lint unit fast warm soak chaos replicas conformance bench bench-stream clean

demo: $(LOCAL)
	$(BIN)/kvstreams demo

up: $(LOCAL)
	$(BIN)/kvstreams up

test: lint unit

lint: $(INSTALLED)
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports

# First the kernels, once: six test processes at a time would each compile them.
unit: warm
	$(BIN)/pytest

# The tests that need no Kafka.
fast: warm
	$(BIN)/pytest tests/unit

warm: $(INSTALLED)
	@$(BIN)/kvstreams warm

# Ten million operations on every index against the reference: some 50 minutes.
soak: warm
	$(BIN)/python -m tests.soak --operations 10000000

# A real Kafka, 100,000 records, and a worker killed at every effect, again and again: some 10 minutes.
chaos: warm
	$(BIN)/python -m tests.chaos

# Three routers on a real Kafka, 5,000 bookings; one is killed, Kafka is away for 20 s, one starts late: some 5 minutes.
replicas: warm
	$(BIN)/python -m tests.replicas

conformance: warm
	$(BIN)/python -m tests.conformance tests/conformance_cases.jsonl $(CASES)

# The index beside its peers; they are built with cargo where it is there. BENCH="--quick" for a smoke test.
bench: warm
	$(BIN)/python -m benchmarks.index $(BENCH)

# Events in to visible, recovery and fail-over, on a real Kafka with real processes: some ten minutes, alone on a machine.
bench-stream: warm
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.failover

clean:
	-[ ! -x $(BIN)/kvstreams ] || $(BIN)/kvstreams kafka down
	rm -rf .venv .kvstreams

# The stamp is written last, so that an installation that was cut off is repeated. dev includes all of local.
$(LOCAL): EXTRA := local
$(INSTALLED): EXTRA := dev
$(LOCAL) $(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvstreams needs Python 3.11 or newer; set PYTHON to one, as in: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "installing kvstreams[$(EXTRA)] into .venv, once"
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 $(PYTHON) tools/install.py .venv '.[$(EXTRA)]'
	@touch $(LOCAL) $@
