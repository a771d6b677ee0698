# Two commands for a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
JOBS ?= 2
STAMP := $(VENV)/.installed
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
LOWEST := .venv-lowest
LOWEST_STAMP := $(LOWEST)/.installed
PEERS_PIP := $(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-peers test-lowest torture wheel check-wheel docs format results page bench clean

demo: $(STAMP)
	$(VENV)/bin/dapcal demo

test: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pylint src
	$(VENV)/bin/pytest -n auto --dist worksteal  # neighbours stay together, so what they share is fitted once

test-peers: $(PEERS_STAMP)  # the adapters against the libraries that they adapt
	$(PEERS)/bin/pytest tests/peers
	$(PEERS)/bin/pytest tests/test_docs.py -k "bring-your-own or integrations or tutorial-lightning or tutorial-text"

test-lowest: $(LOWEST_STAMP)  # the suite with the lowest versions that pyproject.toml allows
	$(LOWEST)/bin/pytest -n auto --dist worksteal -W ignore::DeprecationWarning  # of old versions, by their own needs

torture: $(STAMP)  # 90 minutes of damage, kills and floods, QUICK=1: 15; goes on where it was interrupted
	PYTHONPATH=tests $(VENV)/bin/python -m torture $(if $(QUICK),--quick --out build/torture.json,--out results/torture.json) --jobs $(JOBS)

wheel: $(STAMP)  # sdist, wheel, and what they were tested with, into dist/
	rm -rf dist
	$(VENV)/bin/python -m build --outdir dist .
	$(VENV)/bin/python scripts/sbom.py dist

check-wheel: wheel  # the wheel in an empty environment, without the checkout
	$(VENV)/bin/python scripts/check_wheel.py dist/*.whl -c $(CURDIR)/constraints.txt

results: $(STAMP)  # the toy experiments' numbers, the tables and pictures of README and docs
	$(VENV)/bin/dapcal reproduce two-moons --seeds 10 --out build/results
	$(VENV)/bin/dapcal reproduce sinusoid --seeds 10 --out build/results
	$(VENV)/bin/dapcal reproduce posteriors --out build/results
	mkdir -p results docs
	cp build/results/two-moons.json build/results/sinusoid.json build/results/posteriors.json results/
	cp build/results/two-moons-confidence.png build/results/posteriors-*.png docs/
	$(VENV)/bin/python docs/figures.py
	$(VENV)/bin/python -m dapcal.experiments.page.tables results README.md docs/posteriors.md

page: $(STAMP)  # docs/results.md, no-harm.md and performance.md with their figures, and the README's table, from the files in results/
	$(VENV)/bin/python -m dapcal.experiments.page.results results docs
	$(VENV)/bin/python -m dapcal.experiments.page.no_harm results docs
	$(VENV)/bin/python -m dapcal.experiments.page.choosing results docs/choosing.md
	$(VENV)/bin/python -m dapcal.experiments.page.pixel_trap results docs/choosing.md
	$(VENV)/bin/python -m dapcal.experiments.page.networks results docs/networks.md
	$(VENV)/bin/python -m dapcal.experiments.page.estimators results docs/sklearn.md
	$(VENV)/bin/python -m dapcal.experiments.page.multi_label results docs/targets.md
	$(VENV)/bin/python -m dapcal.experiments.page.table_flags results docs/unusual-rows.md
	$(VENV)/bin/python -m dapcal.experiments.page.table_accuracy results docs/tables.md
	$(VENV)/bin/python -m dapcal.experiments.page.performance results docs
	$(VENV)/bin/python -m dapcal.experiments.page.scale results docs/scale.md
	$(VENV)/bin/python -m dapcal.experiments.page.trust results docs/trust.md
	$(VENV)/bin/python -m dapcal.experiments.page.tables results README.md docs/posteriors.md

bench: $(PEERS_STAMP)  # half an hour of speed and memory beside other libraries, QUICK=1: small; goes on where interrupted
	PYTHONPATH=benchmarks $(PEERS)/bin/python -m performance $(if $(QUICK),--small)
	$(if $(QUICK),,$(PEERS)/bin/python -m dapcal.experiments.page.performance results docs)

docs: $(STAMP)  # the site, into site/; not --quiet, which hides warnings from --strict
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dapcal needs Python >= 3.11")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $(STAMP)

# those without their dependencies ask for torchvision, which does not import beside a CPU build of torch
$(PEERS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS_PIP) torch
	$(PEERS_PIP) -e '.[test]'
	$(PEERS_PIP) torchmetrics opt-einsum tqdm einops einconv linear_operator unfoldNd \
	  posteriors numpyro transformers lightning 'peft>=0.13' 'accelerate>=1.0' mlflow-skinny tabm rtdl-num-embeddings crepes mapie
	$(PEERS_PIP) --no-deps laplace-torch curvlinops-for-pytorch backpack-for-pytorch asdfghjkl==0.1a4 \
	  bayesian-torch torch-uncertainty pytorch-ood
	touch $(PEERS_STAMP)

$(LOWEST_STAMP): pyproject.toml scripts/lowest.py
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) scripts/lowest.py > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check -c $(LOWEST)/lowest.txt torch
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check -c $(LOWEST)/lowest.txt -e '.[test]'
	touch $(LOWEST_STAMP)

clean:
	rm -rf $(VENV) $(PEERS) $(LOWEST) .mypy_cache .pytest_cache .ruff_cache build dist site src/*.egg-info
