# Two commands: `make demo` and `make test`. Each makes .venv, installs what is pinned in constraints.txt, fetches and
# starts what it needs, and cleans up behind itself.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test up lint unit clean

demo: $(INSTALLED)
	$(BIN)/kvstreams demo

up: $(INSTALLED)
	$(BIN)/kvstreams up

test: lint unit

lint: $(INSTALLED)
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(INSTALLED)
	$(BIN)/pytest

clean:
	-[ ! -x $(BIN)/kvstreams ] || $(BIN)/kvstreams kafka down
	rm -rf .venv .kvstreams

# The stamp is written last: an install that was cut off is done again.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvstreams needs Python 3.11 or newer; set PYTHON to one, as in: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "installing into .venv (once; half a minute)"
	@$(PYTHON) -m venv .venv
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@
