# The server as an image. The base decides what is installed into it:
#   make image              Inferentia2 and Trainium: AWS's image with SDK 2.25.0, the last with transformers-neuronx
#   make image DEVICE=cpu   CPUs: a slim image of Python
#   make image DEVICE=cuda  NVIDIA's GPUs: the same, with PyPI's torch, which brings CUDA's libraries
ARG BASE_IMAGE=public.ecr.aws/neuron/pytorch-inference-neuronx:2.7.0-neuronx-py310-sdk2.25.0-ubuntu22.04
FROM ${BASE_IMAGE}

# Whoever the base ends as. What follows belongs to root, so that the server cannot change itself.
USER 0
WORKDIR /app

# Number 1000, because on most hosts that is the person who makes the folder that is mounted on /data. AWS's image
# has a user of this number. Another number (--user) works too; with group 0 it may write to a new volume.
RUN { getent passwd 1000 >/dev/null \
        || useradd --uid 1000 --no-create-home --home-dir /data --shell /usr/sbin/nologin server; } \
    && install -d -o 1000 -g 0 -m 0775 /data

# A newer runtime library and its collectives over SDK 2.25's, for hosts with driver 2.29 or later (docs/neuron.md):
# make image ARGS="--build-arg NEURON_RUNTIME=2.33". From AWS's repository, which the base names.
ARG NEURON_RUNTIME=""
RUN if [ -n "$NEURON_RUNTIME" ]; then \
        apt-get update \
        && apt-get install -y --no-install-recommends \
            "aws-neuronx-runtime-lib=$NEURON_RUNTIME.*" "aws-neuronx-collectives=$NEURON_RUNTIME.*" \
        && rm -rf /var/lib/apt/lists/*; \
    fi

# The dependencies by themselves: this layer, the large one, is kept when only our code changes. On AWS's image
# nothing that the SDK was tested with may move; pip stops where that cannot be. Elsewhere torch comes from
# TORCH_INDEX (see the Makefile), or from PyPI where that is empty.
COPY pyproject.toml ./
ARG TORCH_INDEX=""
# hadolint ignore=DL3013
RUN install() { python3 -m pip --disable-pip-version-check install --no-cache-dir --root-user-action=ignore "$@"; } \
    && pinned() { sed -n "s/.*\"\($1==[^\"]*\)\".*/\1/p" pyproject.toml; } \
    && if python3 -m pip show --quiet transformers-neuronx 2>/dev/null; then \
        python3 -m pip list --format=freeze >/tmp/installed.txt \
        && grep -iE '^(.*neuron.*|torch.*|.*xla|transformers|tokenizers|huggingface.hub|safetensors|numpy|protobuf)==' \
            /tmp/installed.txt >/tmp/sdk.txt \
        && install --constraint /tmp/sdk.txt ".[otel]" "$(pinned sentencepiece)"; \
    else \
        install --no-deps --retries 1 --timeout 15 ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$(pinned torch)" \
        && install ".[cpu,otel]"; \
    fi \
    && rm -rf build ./*.egg-info /tmp/installed.txt /tmp/sdk.txt

# Whatever the umask of the checkout was, the server can read its files; it cannot write the bytecode, so that is
# done here.
COPY LICENSE entrypoint.sh *.py compatibility_aliases.json ./
COPY api api
COPY text text
COPY engine engine
COPY models models
COPY demo/model demo/model
RUN find . ! -perm -444 -exec chmod a+rX {} + && python3 -m compileall -q . \
    && if python3 -m pip show --quiet openvino 2>/dev/null; then \
        DEVICE=cpu MODEL_CACHE="$PWD/demo/converted" python3 -m models.convert --ahead && chmod -R a+rX demo; \
    fi

# /data keeps downloads, compiled and converted models, and compiled sampling loops. The demonstration model starts
# without it; --read-only needs a --tmpfs /tmp (TEMP: AWS's image names a folder for it that only its own user can
# reach).
#
# PORT is TGI's. A user without rights may listen on 80 in Docker's containers, where
# net.ipv4.ip_unprivileged_port_start is 0. Where it is not (podman, Kubernetes on containerd 1, --network host), and
# on SageMaker, which asks on 8080, set PORT=8080. SAGEMAKER_BIND_TO_PORT and Vertex AI's AIP_HTTP_PORT come before
# PORT, and a flag before all of them.
ENV HF_HOME=/data \
    NEURON_COMPILE_CACHE_URL=/data/neuron-compile-cache \
    MODEL_CACHE=/data/model-cache \
    PORT=80 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TEMP=/tmp
EXPOSE 80
USER 1000
# Not /app: neuronx-cc writes its log into the working folder.
WORKDIR /data
# make image DEVICE=cpu MODEL=smollm2: with the model to try in it.
ARG MODEL=""
# Downloaded and converted: where nothing is mounted on /data, a start needs no network.
RUN if [ -n "$MODEL" ]; then MODEL_ID=$MODEL DEVICE=cpu PYTHONPATH=/app python3 -m models.convert --ahead; fi
ENV MODEL_ID=${MODEL}

# Asks where this run listens, whichever setting said so. Until the model is loaded (--startup-timeout, an hour) it
# is "starting"; http.client because a proxy that is meant for downloads is no way to ourselves.
HEALTHCHECK --start-period=1h --interval=10s --timeout=5s --retries=3 CMD ["python3", "-I", "-c", "\
import glob, http.client, json, os; \
run = json.load(open(glob.glob((os.environ.get('TMPDIR') or '/tmp') + '/neuron-textgen.*/config.json')[0])); \
server = http.client.HTTPConnection(run['hostname'], run['port'], timeout=4); \
server.request('GET', '/health'); \
answer = server.getresponse(); \
exit(0 if answer.status == 200 else f'{answer.status} {answer.read().decode()}')"]

# SageMaker adds the word "serve", Docker nothing or flags.
ENTRYPOINT ["/app/entrypoint.sh"]
CMD []

ARG VERSION=""
ARG REVISION=""
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
    org.opencontainers.image.title="neuron-textgen" \
    org.opencontainers.image.description="Serves large language models on AWS Inferentia2 and Trainium, CPUs and CUDA GPUs" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
