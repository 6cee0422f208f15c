# Needs Python 3.11 and make; everything else goes into .venv, at the versions in constraints.txt.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH := torch==2.13.0
PLANS ?= 100000
CASES ?= 20000

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
INSTALL := $(PIP) install -c constraints.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-browser models docs reference check house format bench fuzz fuzz-trees fuzz-resume coverage constraints clean

help: ## List the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: .venv/.demo ## Train on a real corpus in three ways and show the difference
	@$(BIN)/python -m evenstep.demo

test: .venv/.dev ## Run the tests
	@$(BIN)/python -m pytest

test-slow: .venv/.dev ## Run what takes longer: crashes, all models, long property tests
	@$(BIN)/python -m pytest -m slow
	@$(BIN)/python -m pytest --hypothesis-profile=long

test-browser: .venv/.browser ## Open the site and reports in a real Chromium
	@$(BIN)/python -m pytest -n 0 -s -m browser tests/browser

models: .venv/.dev ## Measure every model of transformers and write docs/models.md
	@$(BIN)/python -m tests.slow.models

docs: .venv/.dev ## Build the documentation into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "Wrote build/site/index.html"

reference: .venv/.dev ## Write docs/reference from docstrings and help texts
	@$(BIN)/python -m docs.generate

check: .venv/.dev ## Lint, check formatting, types, import layers and size
	@echo "ruff check";    $(BIN)/ruff check
	@echo "ruff format";   $(BIN)/ruff format --check
	@echo "mypy";          $(BIN)/mypy
	@echo "import-linter"; $(BIN)/lint-imports --no-logo
	@echo "size";          $(BIN)/python -m tests.house --check

house: .venv/.dev ## Print the tree, its size and what four walks pass through
	@$(BIN)/python -m tests.house

format: .venv/.dev ## Fix what ruff can fix, and format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: .venv/.bench ## Run the benchmarks against peers (needs a C++ compiler)
	@$(BIN)/python benchmarks/planning.py
	@$(BIN)/python benchmarks/tensors.py
	@$(BIN)/python benchmarks/overhead.py
	@$(BIN)/python benchmarks/pool.py
	@$(BIN)/python benchmarks/streams.py
	@$(BIN)/python benchmarks/steps.py
	@$(BIN)/python benchmarks/rollouts.py
	@$(BIN)/python benchmarks/compat.py
	@$(BIN)/python benchmarks/ray_dispatch.py
	@$(BIN)/python benchmarks/simulation.py

fuzz: .venv/.dev ## Make and check PLANS random plans (100000)
	@$(BIN)/python -m tests.fuzz --plans $(PLANS)

fuzz-trees: .venv/.dev ## Plan and check CASES random forests that share prefixes (20000)
	@$(BIN)/python -m tests.fuzz --trees $(CASES)

fuzz-resume: .venv/.dev ## Stop and resume CASES random streams of each kind (20000)
	@$(BIN)/python -m tests.fuzz_resume --cases $(CASES)

coverage: .venv/.dev ## Measure test coverage, kernels run as plain Python
	@NUMBA_DISABLE_JIT=1 $(BIN)/coverage run -m pytest -n 0
	@$(BIN)/coverage report

constraints: ## Resolve all extras anew and rewrite constraints.txt
	@echo "Resolving all extras (some minutes)"
	@$(PYTHON) -m venv --clear build/constraints
	@build/constraints/bin/python -m pip --disable-pip-version-check -qq install \
		"$(TORCH)" -e ".[cli,torch,hf,parquet,datasets,png,browser,dev,bench]"
	@{ echo "# The pinned set for Python 3.11, all extras. Regenerate with: make constraints"; \
		build/constraints/bin/python -m pip freeze --all --exclude pip --exclude-editable \
		| sed -E 's/^([^=]+==[^+]+)\+.*/\1/'; } > build/constraints.txt
	@mv build/constraints.txt constraints.txt
	@rm -rf build/constraints
	@echo "Wrote constraints.txt"

clean: ## Remove .venv, builds and caches
	rm -rf .venv build dist .coverage htmlcov .hypothesis
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Evenstep needs Python 3.11 or newer. Set PYTHON=/path/to/python3.11." >&2; exit 2; }
	@echo "Creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear .venv
	@touch $@

.venv/.demo: .venv/.created pyproject.toml constraints.txt
	@echo "Installing evenstep[cli,torch] into .venv (some minutes: torch)"
	@$(INSTALL) "$(TORCH)" -e ".[cli,torch]"
	@touch $@

.venv/.dev: .venv/.created pyproject.toml constraints.txt
	@echo "Installing evenstep[dev] into .venv (some minutes: torch)"
	@$(INSTALL) -e ".[dev]"
	@touch $@

# A Chromium of the system if there is one; else Debian's, if this user may install it; else
# playwright's own.
.venv/.browser: .venv/.dev
	@echo "Installing evenstep[browser] into .venv"
	@$(INSTALL) -e ".[dev,browser]"
	@command -v chromium || command -v chromium-browser || command -v google-chrome \
		|| { [ "$$(id -u)" = 0 ] && apt-get install -y -qq chromium; } \
		|| $(BIN)/python -m playwright install chromium
	@touch $@

.venv/.bench: .venv/.created pyproject.toml constraints.txt
	@echo "Installing evenstep[bench] into .venv (some minutes)"
	@$(INSTALL) "$(TORCH)" -e ".[bench]"
	@touch $@
