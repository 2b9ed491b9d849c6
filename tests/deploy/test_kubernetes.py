"""What the chart sends, and the manifests that it does not print, fit the server, the machines and each other."""

import re
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
import yaml
from manifests import (
    DEPLOY,
    DEVICES,
    IMAGE,
    VERSIONS,
    complaints,
    find,
    invalid,
    pod_templates,
    read,
    release,
    rendered,
    variables,
    window_s,
)

import config
from api.routes import openapi_document
from config import Config
from engine.metrics import METRICS, VLLM_METRICS
from models.neuron.plan import INSTANCES
from run import HERE

BESIDE = ("kubernetes/namespace.yaml", "kubernetes/compile.yaml", "ray/rayservice.yaml")
GIB = 1 << 30
API = openapi_document()
NAMES = {name for setting in config.SETTINGS.values() for name in setting.metadata["names"]}


def deployment(device):
    return find(release(device), "Deployment")["spec"]


def option(name):
    """The last object of a manifest that adds something to the Deployment."""
    return read(f"kubernetes/manifests/{name}.yaml")[-1]


def metrics_in(text):
    return set(re.findall(r"\btgi_(\w+)", text))


@pytest.mark.parametrize("path", BESIDE)
def test_what_is_applied_beside_the_chart_is_valid_and_safe(path):
    for document in read(path):
        assert invalid(document) is None
        assert list(complaints(document)) == []
        assert document["metadata"].get("namespace", "neuron-textgen") == "neuron-textgen"


@pytest.mark.parametrize("name", DEVICES)
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


@pytest.mark.parametrize("name", DEVICES)
def test_probes_service_and_monitor_ask_where_the_server_answers(name):
    (server,) = deployment(name)["template"]["spec"]["containers"]
    (port,) = server["ports"]
    assert port == {"name": "http", "containerPort": int(variables(server)["PORT"])}
    paths = {kind: server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/health", "liveness": "/live"}
    (endpoint,) = option("monitoring")["spec"]["podMetricsEndpoints"]
    for path in {*paths.values(), endpoint["path"]}:
        assert API["paths"][path]["get"]["security"] == [], "it needs no key"
    (service,) = find(release(name), "Service")["spec"]["ports"]
    policy = find(release(name), "NetworkPolicy")["spec"]["ingress"][0]["ports"][0]["port"]
    ports = {server[f"{kind}Probe"]["httpGet"]["port"] for kind in paths} | {service["targetPort"], endpoint["port"], policy}
    assert ports == {"http"}


def test_the_network_policy_lets_out_names_downloads_and_traces():
    egress = find(release("cpu"), "NetworkPolicy")["spec"]["egress"]
    otlp = re.search(r"http://localhost:(\d+)", config.SETTINGS["--otlp-endpoint"].metadata["help"])[1]
    assert {port["port"] for rule in egress for port in rule["ports"]} == {53, 443, int(otlp)}
    assert all(rule["to"] for rule in egress)
    blocks = {peer["ipBlock"]["cidr"]: peer["ipBlock"] for rule in egress for peer in rule["to"] if "ipBlock" in peer}
    node = [ip_address("169.254.169.254"), ip_address("fd00:ec2::254")]  # where a node gives out its credentials
    assert {"0.0.0.0/0", "::/0"} <= blocks.keys()
    for block, address in zip((blocks["0.0.0.0/0"], blocks["::/0"]), node, strict=True):
        assert any(address in ip_network(network) for network in block["except"])


def test_the_namespace_names_the_version_of_its_rules_for_pods():
    (namespace,) = read("kubernetes/namespace.yaml")
    labels = namespace["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert labels["pod-security.kubernetes.io/enforce-version"] == f"v{VERSIONS[0]}"


def test_an_ingress_and_a_gateway_lead_to_the_service_and_end_no_stream():
    service = find(release("cpu"), "Service")
    ingress = option("ingress")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    backend = path["backend"]["service"]
    assert (backend["name"], backend["port"]["name"]) == (service["metadata"]["name"], service["spec"]["ports"][0]["name"])
    attributes = ingress["metadata"]["annotations"]["alb.ingress.kubernetes.io/load-balancer-attributes"]
    assert int(attributes.removeprefix("idle_timeout.timeout_seconds=")) > 15  # a stream has a comment every 15 s
    route = option("gateway")["spec"]
    assert route["rules"][0]["backendRefs"] == [
        {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    ]
    assert route["rules"][0]["timeouts"] == {"request": "0s"}
    assert route["parentRefs"] == [{"name": find(read("kubernetes/manifests/gateway.yaml"), "Gateway")["metadata"]["name"]}]


@pytest.mark.parametrize("name", DEVICES)
def test_every_selector_finds_the_pods(name):
    labels = deployment(name)["template"]["metadata"]["labels"]
    selectors = [
        find(release(name), kind)["spec"] for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment")
    ]
    selectors.append(option("monitoring")["spec"])
    found = [spec["podSelector"] if "podSelector" in spec else spec["selector"] for spec in selectors]
    assert all(selector.get("matchLabels", selector) == labels for selector in found)
    assert find(read("kubernetes/compile.yaml"), "Job")["spec"]["template"]["metadata"]["labels"] != labels


def test_every_variable_is_a_setting_and_every_image_is_of_this_version():
    sent = {device: release(device) for device in DEVICES} | {path: read(path) for path in BESIDE}
    for name, documents in sent.items():
        templates = [template for document in documents for template in pod_templates(document)]
        for container in [container for template in templates for container in template["spec"]["containers"]]:
            assert {name for name in variables(container) if not name.startswith("RAY_")} - {"HOME"} <= NAMES
            assert container["image"].removesuffix("-cpu").split(":")[1] == config.VERSION
            assert container["image"].endswith("-cpu") == (name == "cpu")


def test_the_job_compiles_into_the_volume_that_the_pods_mount():
    job = find(read("kubernetes/compile.yaml"), "Job")["spec"]["template"]["spec"]
    verb, *flags = job["containers"][0]["args"]
    (output,) = [flag.removeprefix("--output=") for flag in flags if flag.startswith("--output=")]
    compiled = config.parse([flag for flag in flags if not flag.startswith("--output=")], {})
    assert (verb, Path(output).parent) == ("compile", Path("/data"))
    for name in ("inf2", "trn1"):
        pod = deployment(name)["template"]["spec"]
        assert [volume for volume in pod["volumes"] if volume["name"] == "data"] == [job["volumes"][1]]
        assert variables(pod["containers"][0])["MODEL_ID"] == compiled.model_id
        claims = [find(documents, "PersistentVolumeClaim") for documents in (release(name), read("kubernetes/compile.yaml"))]
        assert claims[0]["spec"] == claims[1]["spec"]
        assert claims[0]["metadata"]["name"] == claims[1]["metadata"]["name"]


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


def test_a_volume_of_one_node_is_never_wanted_by_two_pods_at_once():
    """With ReadWriteOnce a new pod on another node would wait for the volume of the old one, which waits for the new pod."""
    assert find(release("inf2"), "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert deployment("inf2")["strategy"] == {"type": "Recreate"}


def test_autoscalers_read_metrics_that_exist():
    (values,) = read("kubernetes/prometheus-adapter-values.yaml")
    rule = values["rules"]["custom"][0]
    (metric,) = find(rendered({"autoscaling": {"by": "hpa"}}), "HorizontalPodAutoscaler")["spec"]["metrics"]
    (trigger,) = option("keda")["spec"]["triggers"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    queries = rule["seriesQuery"] + rule["metricsQuery"], trigger["metadata"]["query"]
    for query in queries:
        assert metrics_in(query) == {"queue_size", "slots_busy", "slots_total"} <= {name for _, name, *_ in METRICS}
    of_vllm = set(re.findall(r"`(vllm:num_\w+|vllm:\w+_perc)`", (DEPLOY / "kubernetes" / "README.md").read_text()))
    assert len(of_vllm) == 3 and of_vllm <= {name for _, name, *_ in VLLM_METRICS}


def test_an_autoscaler_owns_the_number_of_replicas():
    scaled = find(rendered({"autoscaling": {"by": "hpa"}}), "HorizontalPodAutoscaler"), option("keda")
    targets = {document["spec"]["scaleTargetRef"]["name"] for document in scaled}
    for name in DEVICES:
        assert {find(release(name), "Deployment")["metadata"]["name"]} == targets
        assert "replicas" not in deployment(name)


def test_a_ray_worker_has_room_for_one_replica():
    service = find(read("ray/rayservice.yaml"), "RayService")["spec"]
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
    dockerfile = (DEPLOY / "ray" / "Dockerfile").read_text()
    (environment,) = re.findall(r"python3 -m venv (\S+)", dockerfile)  # what the SDK was tested with may not move
    (installed,) = re.findall(r"(\S*pip) --disable-pip-version-check install .* \"ray\[serve\]==(\S+)\"", dockerfile)
    assert installed == (f"{environment}/bin/pip", cluster["rayVersion"])
    extra = re.search(r"^ray = \[(.*?)\]", (HERE / "pyproject.toml").read_text(), flags=re.MULTILINE)[1]
    assert all(package in dockerfile for package in re.findall(r'"[^"]+"', extra))
    assert re.search(r"\bPYTHON=python3$", dockerfile, flags=re.MULTILINE)
    assert set(re.findall(rf"{IMAGE}(?:-ray)?:(\S+)", dockerfile)) == {config.VERSION}


def test_the_application_of_the_ray_service_is_there_and_takes_its_arguments():
    (application,) = yaml.safe_load(find(read("ray/rayservice.yaml"), "RayService")["spec"]["serveConfigV2"])["applications"]
    module, name = application["import_path"].split(":")
    source = (HERE / f"{module.replace('.', '/')}.py").read_text()
    assert f"\ndef {name}(arguments:" in source
    assert all(f'"{name}":' in source or f"--{name}" in config.SETTINGS for name in application["args"])


def test_an_inference_gateway_finds_the_pods_and_its_picker_reads_metrics_that_are_there():
    made = rendered({"gateway": {"className": "eg", "endpointPicker": "neuron-textgen-epp"}})
    pool = find(made, "InferencePool")
    (values,) = read("kubernetes/llm-d-router-values.yaml")
    router = values["router"]
    template = deployment("cpu")["template"]
    for selector, ports in (
        (pool["spec"]["selector"], pool["spec"]["targetPorts"]),
        (router["modelServers"], router["modelServers"]["targetPorts"]),
    ):
        assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert ports == [{"number": template["spec"]["containers"][0]["ports"][0]["containerPort"]}]
    (backend,) = find(made, "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    # What llm-d's picker and the Gateway API Inference Extension read of a server whose type is vllm.
    asked = {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"}
    assert router["modelServers"]["type"] == "vllm" and asked <= {name for _, name, *_ in VLLM_METRICS}
