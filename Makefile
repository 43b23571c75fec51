# The first Python that can make a virtual environment and that the host supports.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3.13 python3; do \
	$$p -c 'import venv' >/dev/null 2>&1 && echo $$p && break; done)
VENV ?= .venv
INSTALLED := $(VENV)/.installed
# One thread for each process: as many processes as cores.
PYTEST_ARGS ?= -n auto --dist worksteal
DEMO_ARGS ?=

.PHONY: demo test install

demo: $(INSTALLED)
	$(VENV)/bin/python tools/demo.py $(DEMO_ARGS)

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

install: $(INSTALLED)

$(INSTALLED): setup.py pyproject.toml $(wildcard requirements/*.txt acmix_det/ops/csrc/*)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -e '.[lite,digits,pretrain,test]'
	touch $@
