# Everything a newcomer needs: `make demo`, `make test`. Set-up happens by itself, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test fuzz oldest check fix docs bench torture clean
help: ## what can be made
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

$(READY): pyproject.toml paper/pyproject.toml constraints.txt $(wildcard src/dualform/native/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./paper
	@touch $@

demo: $(READY) ## train the digits network with recording, verify it, show where predictions come from
	$(BIN)/dualform demo

test: $(READY) ## run all tests, two files at a time (ARGS="-k masks" for some of them)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

fuzz: $(READY) ## run the tests with drawn examples on other and more examples than `make test` (again and again, if you like)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m hypothesis --hypothesis-profile=random $(ARGS)

OLDEST := .venv-oldest
CORE := tests/store tests/record tests/totals tests/dual tests/query tests/test_cli.py tests/test_recursions.py
$(OLDEST)/.ready: pyproject.toml paper/pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt \
		-e '.[demo,evaluate,explorer]' -e ./paper httpx hypothesis pytest pytest-xdist
	@touch $@

oldest: $(OLDEST)/.ready ## run the tests of the core with the oldest versions that are allowed (Python 3.11)
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile $(CORE) $(ARGS)

check: $(READY) ## format, lint, types and the direction of imports; prints how dense the core is
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python scripts/code_metrics.py

fix: $(READY) ## format and mend what can be mended by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

DOCS := .venv-docs
$(DOCS)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check 'mkdocs-material>=9.6' 'mkdocstrings[python]>=0.30' 'ruff>=0.6' 'typer>=0.16' 'rich>=13.7'
	@touch $@

docs: $(DOCS)/.ready ## build the site into site/ and check its links (look at it: python -m http.server -d site)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	$(DOCS)/bin/python scripts/check_site.py site

BENCHES := recording certificate exactness table1 top totals masks contributions adamw tracin memory disk growth influence
bench: $(READY) ## measure everything beside peers and limits (an hour, 25 GB of disk in runs/bench; needs the data folder)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]' -e ./paper
	for name in $(BENCHES); do $(BIN)/python bench/$$name.py || exit 1; done
	$(BIN)/python bench/figure.py

torture: $(READY) ## kill, damage and starve recordings until the counts of docs/reliability.md are reached (hours; goes on where it stopped)
	$(BIN)/python bench/torture.py all; status=$$?; $(BIN)/python bench/reliability.py; exit $$status

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) $(OLDEST) $(DOCS) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
