# Every target sets up what it needs in .venv first; nothing is installed anywhere else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS := cpu,export,quantize,tokenizers,rtx,serve,plot,train,bench,dev

# Each worker begins with a stretch of the tests as they stand, so that few modules' fixtures are made twice; whoever is
# done first takes from the rest of another.
WORKERS := -n auto --dist worksteal --durations 10

.DEFAULT_GOAL := help
.PHONY: help demo test test-numeric test-all check package format bench docs javascript tritonclient clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## Export the shipped model, verify it, decode words beside PyTorch
	@$(BIN)/python examples/g2p/demo.py

test: $(INSTALLED) ## Run every kind of test once, a worker on each CPU; 6 to 7 minutes on 2 cores
	@$(BIN)/pytest $(WORKERS)

test-all: $(INSTALLED) ## Run the full matrices too; at most an hour on 2 cores
	@$(BIN)/pytest $(WORKERS) -m ""

test-numeric: $(INSTALLED) ## Run the tests that compare numbers in other arithmetic than this processor's; 3 minutes
	@$(BIN)/python -m tests.arithmetic $(WORKERS)

check: $(INSTALLED) ## Check formatting, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

package: $(INSTALLED) ## Build the sdist, and the wheel from it, into dist/; check both, and run the wheel by itself
	@rm -rf build/lib build/bdist.* dist *.egg-info  # what they name may be gone
	@$(BIN)/python -m build --outdir dist .
	@$(BIN)/python .ci/check_package.py

format: $(INSTALLED) ## Format the code and mend what the linter can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(INSTALLED) ## Measure speed and memory beside CTranslate2 and PyTorch, under an hour; rewrite README's figures
	@$(BIN)/python -m benchmarks.generation --beams 1 4
	@$(BIN)/python -m benchmarks.scaling --reuse
	@$(BIN)/python -m benchmarks.memory --reuse
	@$(BIN)/python -m benchmarks.files
	@$(BIN)/python -m benchmarks.readme

gpu-check: $(INSTALLED) ## Test and measure on this machine's NVIDIA GPU; at most ten minutes, nothing without one
	@$(BIN)/python -m benchmarks.gpu_check

docs: $(INSTALLED) ## Write docs/cli.md anew from the command line's help
	@$(BIN)/python -m tfm_export.cli.reference docs/cli.md

tritonclient: ## Install NVIDIA's client of inference servers beside the rest, so that its test runs
	$(PYTHON) -m venv build/tritonclient
	build/tritonclient/bin/pip install --quiet "tritonclient[http]==2.73.0"

javascript: ## Install what the JavaScript examples need, so that their tests run; needs Node and npm
	@for example in node web; do \
		npm ci --prefix examples/$$example --ignore-scripts --no-audit --no-fund || exit 1; done

clean: ## Remove .venv and everything else that make or the tests made
	@rm -rf $(VENV) build dist *.egg-info examples/*/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The tested set of versions; installed again when one of the two files changes.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "tfm-export needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
		"If you have another, name it: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "Setting up .venv with $$($(PYTHON) --version) and the tested versions of torch, onnx, onnxruntime ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]' -c constraints.txt
	@# A trained model for the tests; what it depends on, chemistry, is not needed.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps annalog -c constraints.txt
	@touch $@
