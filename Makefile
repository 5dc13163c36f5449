# `make run` and `make test` do all the set-up themselves.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export FLWR_TELEMETRY_ENABLED := 0
export OMP_NUM_THREADS := 1
# Flower starts a process for each message, which would compile the app again; empty is as good as unset.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run demo test test-faults lint docs screenshots flower keys deploy-local sheet proto requirements torch-hashes clean help

help:          ## show this
	@grep -E '^[a-z0-9-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# The embedded digits are easy: after 5 rounds methods still differ, and the run ends within three minutes on two cores.
# METHODS=all: a network with BatchNorm, which every method fits; on the digits also fewer samples, so that the whole
# table ends within ten minutes. ARGS come last and win; a settings file decides by itself.
comma := ,
ALL   := $(filter all,$(subst $(comma), ,$(METHODS)))
FITS  := $(if $(ALL),$(if $(findstring --model,$(ARGS))$(findstring --settings,$(ARGS)),,--model-options norm=batch))
DEMO  := $(if $(DATASET)$(findstring --settings,$(ARGS)),,--rounds 5 $(if $(ALL),--classifier-rounds 5 --tune-samples 20))

run: $(VENV)/ready  ## train, personalise, adapt; DATASET=, METHODS= (or all), ARGS="--rounds 20 ..."
	$(BIN)/python -m fedtta run $(if $(DATASET),--dataset $(DATASET)) $(if $(METHODS),--methods '$(METHODS)') \
	  $(FITS) $(DEMO) $(ARGS)

demo: $(VENV)/ready  ## four sites with folders of their own, real processes over TLS, a shift after deployment, a page
	$(BIN)/python -m fedtta demo $(ARGS)

test: $(VENV)/ready lint  ## lint, types and all tests that need no GPU, but those of faults and images
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# In parallel, since much of the time is spent waiting until Flower notices that a process is gone. Tests of a file share
# what they start.
test-faults: $(VENV)/ready  ## real processes over TLS: killed, cut off, refused, and every phase undisturbed
	$(BIN)/python -m pytest -m faults -n 3 --dist loadfile --no-loadscope-reorder \
	  tests/faults tests/integration/test_deployment.py tests/integration/test_simulation.py \
	  tests/simulation/test_enrolled.py tests/simulation/test_transport_contract.py $(ARGS)

lint: $(VENV)/ready  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/docs  ## the documentation site in site/; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

screenshots: $(VENV)/ready  ## pictures of the pages in docs/assets/, where there is a chromium
	$(BIN)/python -m tests.browser.screenshots $(ARGS)

flower: $(VENV)/ready  ## the same app through Flower's own CLI, on a SuperLink of its own
	$(BIN)/python -m fedtta.simulation.flower_cli $(ARGS)

keys: $(VENV)/ready  ## keys of a deployment in keys/; ARGS="--nodes 3 --host fl.example.org"
	$(BIN)/python -m fedtta keys $(ARGS)

deploy-local: $(VENV)/ready  ## SuperLink, SuperNodes and agents as processes of this machine; ARGS="--nodes 3 --set rounds=3 ..."
	$(BIN)/python -m fedtta deploy-local $(ARGS)

sheet: $(VENV)/ready  ## an image of every corruption at every severity
	$(BIN)/python -m fedtta.data.corruptions.sheet corruptions.png

# A newer generator needs newer lower bounds in pyproject.toml.
proto: $(VENV)/ready  ## regenerate the modules of the agent's protocol
	$(BIN)/uv run --quiet --no-project --isolated --python '>=3.11,<3.13' --with grpcio-tools==1.78.0 \
	  python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. fedtta/messages/agent.proto

# Images get PyTorch from an index of the builder's choice (docker/install.sh): its packages are left out of their files.
TORCH := $$(grep -oE '^(torch|torchvision|triton|(nvidia|cuda)-[a-z0-9-]+)==' requirements.txt | sort -u | \
	sed 's/\(.*\)==/--no-emit-package \1/')

requirements: $(VENV)/ready  ## resolve the pinned versions again
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --custom-compile-command 'make requirements' --upgrade --quiet -o requirements.txt
	for part in edge light server; do \
	  $(BIN)/uv pip compile docker/$$part.in --constraint requirements.txt --universal --python-version 3.11 \
	    --generate-hashes --no-annotate --no-emit-index-url --custom-compile-command 'make requirements' --quiet \
	    $(TORCH) -o requirements-$$part.txt || exit 1; \
	done
# What the site needs in addition to requirements.txt.
	$(BIN)/uv pip compile pyproject.toml --extra docs --constraint requirements.txt --universal --python-version 3.11 \
	  --generate-hashes --no-annotate --no-emit-index-url --custom-compile-command 'make requirements' --quiet \
	  $$(sed -nE "/== 'win32'/{/!= 'win32'/!d}; s/^([a-z0-9-]+)==.*/--no-emit-package \1/p" requirements.txt) -o requirements-docs.txt

# PyTorch's wheels of another index have other hashes; an image refuses to install them unchecked.
torch-hashes: $(VENV)/ready  ## hashes of PyTorch from elsewhere, for images; TORCH_INDEX=<index or folder of CPU wheels>
	if [ -d "$(TORCH_INDEX)" ]; then \
	  sha256sum "$(TORCH_INDEX)"/*.whl | sed -E 's/^([0-9a-f]+) .*\/([a-z]+)-([^-]+)-.*/\2==\3 --hash=sha256:\1/' > $(HASHES); \
	else \
	  printf '%s\n' $(or $(TORCH_PINS),$$(sed -nE 's/^(torch|torchvision)==([^ ]+).*/\1==\2/p' requirements.txt)) | \
	    $(BIN)/uv pip compile - --no-deps --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") --no-annotate --custom-compile-command 'make torch-hashes' \
	    --quiet -o $(HASHES); \
	fi
HASHES = $(or $(TORCH_FILE),requirements-torch.txt)

# uv installs everything; where the machine has none, it comes into the environment by pip first. Bytecode is made here:
# where processes must not write it (PYTHONDONTWRITEBYTECODE, a read-only disk), each would take twice as long to start.
$(VENV)/ready: requirements.txt
	@command -v uv >/dev/null || test -x .cache/uv/bin/uv || \
	  { $(PYTHON) -m venv .cache/uv && .cache/uv/bin/pip install --quiet uv; }
	PATH="$$PATH:$(CURDIR)/.cache/uv/bin"; \
	uv venv --quiet --clear --python '>=3.11,<3.13' $(VENV) && \
	uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r requirements.txt
	@touch $@

# Only the site needs these, so that `make run` stays light.
$(VENV)/docs: $(VENV)/ready requirements-docs.txt
	PATH="$$PATH:$(CURDIR)/.cache/uv/bin"; \
	uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.txt -r requirements-docs.txt
	@touch $@

clean:         ## remove environment, caches and built files; results stay
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis site *.fab

# GPU_PYTHON=python3: with what is installed, where no package index can be reached.
GPU_PYTHON = $(BIN)/python
.PHONY: gpu
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/ready)  ## what only a GPU can show, within 25 minutes; ARGS="--parts equal,images"
	$(GPU_PYTHON) -m fedtta bench gpu $(ARGS)

# By docker, or by buildah as root where there is no engine; STORAGE is the folder of buildah's images.
export BASE BUILD_BASE TORCH_INDEX TORCH_FILE STORAGE
.PHONY: base-image images test-images edge-arm64

base-image:    ## Debian's Python as localhost/fedtta-base, where no registry can be reached; ARCHITECTURE=arm64: -arm64
	docker/base.sh localhost/fedtta-base$(ARCHITECTURE:%=-%) $(ARCHITECTURE)

images:        ## images of server, client and edge, each within its size; BASE=, TORCH_INDEX=, TORCH_FILE=, IMAGES=
	docker/images.sh $(or $(IMAGES),server client edge edge-light)

test-images: $(VENV)/ready  ## SuperLink, SuperNode and agent of the images that buildah built: a run, a prediction
	$(BIN)/python -m pytest -m images tests/docker/test_images.py -k 'not arm64 and not onnx' $(ARGS)

# Newer wheels of arm64 on PyPI need CUDA's libraries.
edge-arm64: $(VENV)/ready  ## the edge image of arm64, and its agent, emulated, against this machine's; BASE=, BUILD_BASE=
	docker/qemu.sh
	PLATFORM=linux/arm64 SUFFIX=-arm64 TORCH_FILE=requirements-arm64.txt docker/images.sh edge edge-light
	$(BIN)/python -m pytest -m images tests/docker/test_images.py -k arm64 -s $(ARGS)
