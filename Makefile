# Two environments are made on first use: .venv (newest supported transformers) and .venv-old (oldest).
# TORCH names a small CPU build by default; `make TORCH=torch` takes whatever pip thinks best (a GPU build on Linux).
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
OLD := .venv-old
OLDEST := transformers==5.0.0

.PHONY: demo test fast lint old wheel clean

demo: $(VENV)/ready
	$(VENV)/bin/tokenprune run v2drop-generic-66.7

test: $(VENV)/dev
	$(MAKE) lint fast

fast: $(VENV)/dev
	$(VENV)/bin/python -m pytest -q -n auto

lint: $(VENV)/dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

old: $(OLD)/ready
	$(OLD)/bin/python -m pytest -q -n auto tests/test_mask_oracle.py tests/test_engine.py tests/test_attention.py tests/test_sites.py

# The wheel, installed elsewhere, run from outside the tree.
wheel: $(VENV)/dev
	rm -rf build/wheel && $(VENV)/bin/python -m build --wheel --outdir build/wheel .
	$(PYTHON) -m venv --system-site-packages build/wheel/venv
	build/wheel/venv/bin/pip install -q --no-deps build/wheel/*.whl
	cd / && PYTHONPATH=$(shell $(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
		$(CURDIR)/build/wheel/venv/bin/tokenprune list

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q "$(TORCH)" -e .
	touch $@

$(VENV)/dev: $(VENV)/ready
	$(VENV)/bin/pip install -q "$(TORCH)" -e ".[dev]"
	touch $@

$(OLD)/ready: pyproject.toml
	$(PYTHON) -m venv $(OLD)
	$(OLD)/bin/pip install -q "$(TORCH)" "$(OLDEST)" -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) $(OLD) build dist
