"""Manifests of Kubernetes: reading and rendering them, and what is invalid or unsafe in them.

`helm` (the package helm-binary) renders the chart without a cluster; kubernetes-validate has the schemas of Kubernetes' own
kinds, and kubernetes_crds.yaml those of the custom resources.
"""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

from run import HERE

DEPLOY = HERE / "deploy"
CHART = DEPLOY / "helm"
DEVICES = ("cpu", "inf2", "trn1")
MODEL = "Qwen/Qwen3-1.7B"
VERSIONS = ("1.30", "1.37")  # of Kubernetes: the oldest with all fields in use, the newest with a schema
IMAGE = "ghcr.io/neuron-textgen/neuron-textgen"
CRDS = yaml.safe_load((HERE / "tests" / "kubernetes_crds.yaml").read_text())


def helm(*arguments, values=None):
    command = [Path(sys.executable).parent / "helm", *arguments, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=60)


def rendered(values, release="neuron-textgen", namespace="neuron-textgen"):
    done = helm("template", release, CHART, "--namespace", namespace, values=values)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@cache
def release(device):
    """What the chart makes for a device."""
    return rendered({"device": device, "modelId": "" if device == "cpu" else MODEL})


def read(path):
    """The documents of a file of deploy/."""
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


def find(documents, kind):
    (document,) = [document for document in documents if document["kind"] == kind]
    return document


def pod_templates(document):
    """The pod templates in a document."""
    spec = document.get("spec", {})
    if document["kind"] == "RayService":
        cluster = spec["rayClusterConfig"]
        return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return [spec["template"]] if document["kind"] in ("Deployment", "Job") else []


def invalid(document):
    """Why the API server would refuse a document, or a field in it has no effect; None for a valid one."""
    kind = document["kind"]
    try:
        if kind not in CRDS:
            for version in VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)
            return None
        spec = {"type": "object", **CRDS[kind]}
        fields = {"apiVersion": spec.pop("apiVersion"), "kind": {}, "metadata": {"$ref": "#/$defs/metadata"}, "spec": spec}
        jsonschema.validate(document, {"$defs": CRDS["$defs"], "properties": fields, "additionalProperties": False})
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        return next(filter(None, (invalid(pod | template) for template in pod_templates(document))), None)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        return f"{kind} {'.'.join(map(str, error.path))}: {error.message}"


def complaints(document):
    """What is unsafe in the pods of a document."""
    for template in pod_templates(document):
        pod = template["spec"]
        context = pod.get("securityContext", {})
        if not context.get("runAsNonRoot") or not context.get("runAsUser"):
            yield "runs as root"
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield "has no seccomp profile"
        if pod.get("automountServiceAccountToken", True) and document["kind"] != "RayService":
            yield "can ask the cluster"  # Ray's head has to, for its autoscaler
        if pod.get("serviceAccountName", "default") == "default" and document["kind"] != "RayService":
            yield "shares the account of other pods"
        if context.get("fsGroup") and context.get("fsGroupChangePolicy") != "OnRootMismatch":
            yield "lets the group write to the model cache"
        if any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
            yield "shares a namespace of the node"
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        if any("hostPath" in volume for volume in volumes.values()):
            yield "mounts a folder of the node"
        for container in pod["containers"]:
            yield from container_complaints(container, volumes, document["kind"])


def container_complaints(container, volumes, kind):
    context, resources = container.get("securityContext", {}), container.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    if context.get("allowPrivilegeEscalation", True) or context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "may gain privileges"
    if not context.get("readOnlyRootFilesystem") and kind != "RayService":  # Ray writes to folders of its own
        yield "may write to its image"
    if not {"cpu", "memory", "ephemeral-storage"} <= requests.keys() & limits.keys():
        yield "has no requests and limits"
    empty = [volume["emptyDir"]["sizeLimit"] for volume in volumes.values() if "emptyDir" in volume]
    if sum(map(gibibytes, empty)) >= gibibytes(limits.get("ephemeral-storage", "0Gi")):
        yield "is evicted before its folders are full"
    if any(requests[name] != limit for name, limit in limits.items() if "/" in name):
        yield "does not request its devices"
    if not re.fullmatch(rf"{IMAGE}(-ray)?:\d+\.\d+\.\d+(-cpu)?", container["image"]):
        yield "has an image without a version"
    if any(mount["name"] not in volumes for mount in container.get("volumeMounts", ())):
        yield "mounts a volume that is not there"
    if kind == "Deployment" and not {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys():
        yield "has no probes"


def gibibytes(quantity):
    return int(quantity.removesuffix("Gi"))


def window_s(probe):
    """Seconds of failures that a probe allows."""
    return probe["periodSeconds"] * probe["failureThreshold"]


def variables(container):
    return {variable["name"]: variable["value"] for variable in container.get("env", ())}
