# make run           serves on port 8080; settings come as variables: PORT=8081 MODEL_ID=... ARGS="--max-batch-size 8"
# make test          runs the tests
# make test-clients  runs the real clients against the real server: huggingface_hub, openai, boto3 and others
# make lint          ruff, as CI runs it
# make clean         removes the environments
.PHONY: run test test-clients lint clean

VENV := .venv
# The python3 of the machine if it is 3.10 to 3.12, else one of those by name.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null && { echo $$p; break; }; done)
BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
PYTEST := $(shell sed -nE 's/.*"(pytest(-timeout)?==[^"]*)".*/\1/p' pyproject.toml)

# The clients do not fit into one environment. What stands behind each name is in tests/clients/requirements-NAME.txt, and
# these are the tests that it runs.
CLIENTS := hub-0.36 hub-1 hub-2
hub-0.36 := test_hub.py test_text_generation.py
hub-1 := test_hub.py test_langchain.py test_litellm.py
hub-2 := test_hub.py test_openai.py test_sagemaker.py

run: $(VENV)/run.installed
	@PATH="$(BIN):$$PATH" exec ./entrypoint.sh serve $(ARGS)

test: $(VENV)/test.installed
	$(BIN)/python -m pytest $(ARGS)

test-clients: $(VENV)/run.installed
	@$(MAKE) --silent --no-print-directory -j $(words $(CLIENTS)) $(CLIENTS:%=$(VENV)-clients/%.installed)
	@$(foreach client,$(CLIENTS),echo "$(client):" && SERVER_PYTHON=$(BIN)/python $(VENV)-clients/$(client)/bin/python \
		-m pytest -c tests/clients/pytest.ini $(addprefix tests/clients/,$($(client))) $(ARGS) &&) true

lint: $(VENV)/test.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) $(VENV)-clients

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: Python 3.10, 3.11 or 3.12 is needed (make PYTHON=/path/to/python3)" >&2; exit 2; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)" >&2
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "error: $(PYTHON) cannot make an environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }

# Without a GPU torch comes from its CPU index, which saves gigabytes of CUDA; that index serves this one package and no
# other. Where it cannot be reached pip says so and takes what it finds.
$(VENV)/run.installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing what the server needs into $(VENV) (once)" >&2
	@nvidia-smi -L >/dev/null 2>&1 || $(PIP) --no-deps --retries 1 --timeout 15 \
		--extra-index-url https://download.pytorch.org/whl/cpu $(TORCH)
	@$(PIP) ".[cpu]"
	@touch $@

$(VENV)/test.installed: $(VENV)/run.installed
	@$(PIP) ".[cpu,test]"
	@touch $@

$(VENV)-clients/%.installed: tests/clients/requirements-%.txt | $(VENV)/bin/python
	@echo "Installing the clients of $* into $(VENV)-clients (once)" >&2
	@$(BIN)/python -m venv --clear $(VENV)-clients/$*
	@$(subst $(BIN),$(VENV)-clients/$*/bin,$(PIP)) --no-compile $(PYTEST) -r $<
	@touch $@
