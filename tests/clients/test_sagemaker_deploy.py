"""deploy/sagemaker/deploy.py: what it asks of AWS, by botocore's own model of the API, and the container that results.

The container is the server of this checkout, started as SageMaker does it: `serve` as argument, the environment that `create`
sends, the model in /opt/ml/model, which like everything but caches and temporary files cannot be written.
"""

import datetime
import json
import os
import subprocess
import sys
import types
import urllib.request
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.stub import Stubber
from demo_server import CHAT_ANSWER, QUESTION, ROOT, serving
from sagemaker_shim import shim

import deploy

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/neuron-textgen:0.2.0"
ROLE = "arn:aws:iam::123456789012:role/textgen"
ARN = "arn:aws:sagemaker:us-east-1:123456789012:any/demo"
ENVIRONMENT = {"PORT": "8080", "MAX_BATCH_SIZE": "3", "MAX_CONCURRENT_REQUESTS": "4"}
SOURCE = {"S3Uri": "s3://bucket/llama/", "S3DataType": "S3Prefix", "CompressionType": "None"}
CREATE = ["create", "demo", "--image", IMAGE, "--role", ROLE, "--instance-type", "ml.inf2.xlarge"]
SCALED = {
    "ServiceNamespace": "sagemaker",
    "ResourceId": "endpoint/demo/variant/AllTraffic",
    "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
}
BEGAN = datetime.datetime(2026, 11, 23, tzinfo=datetime.timezone.utc)
BEGAN_MS = int(BEGAN.timestamp() * 1000)
LOG = "/aws/sagemaker/Endpoints/demo"

# / becomes read-only, but for the folders of this run; /opt is another one, so that nothing of this machine's is touched.
AS_A_CONTAINER = """
set -e
mount -t tmpfs tmpfs /opt
mkdir -p /opt/ml/model "$MODEL_CACHE"
mount --bind demo/model /opt/ml/model
mount -o remount,bind,ro /opt/ml/model
for folder in "$TMPDIR" "$MODEL_CACHE"; do mount --bind "$folder" "$folder"; done
mount -o remount,bind,ro /
! touch /opt/ml/model/file "$PWD/file" 2>/dev/null
exec ./entrypoint.sh serve
"""


@pytest.fixture
def aws(monkeypatch):
    """A stub for each API; each answers what was added to it, in order, and refuses anything else."""
    keys = {"region_name": "us-east-1", "aws_access_key_id": "none", "aws_secret_access_key": "none"}
    names = {"sagemaker": "sagemaker", "logs": "logs", "autoscaling": "application-autoscaling", "runtime": "sagemaker-runtime"}
    clients = {api: boto3.client(api, **keys) for api in names.values()}
    stubs = types.SimpleNamespace(**{name: Stubber(clients[api]) for name, api in names.items()})
    monkeypatch.setattr(boto3, "client", lambda api, **_: clients[api])
    monkeypatch.setattr(deploy, "POLL_S", 0)
    for stub in vars(stubs).values():
        stub.activate()
    yield stubs
    for stub in vars(stubs).values():
        stub.assert_no_pending_responses()


VARIANT = {
    "VariantName": "AllTraffic",
    "ModelName": "demo",
    "InstanceType": "ml.inf2.xlarge",
    "InitialInstanceCount": 1,
    "ModelDataDownloadTimeoutInSeconds": 3600,
    "ContainerStartupHealthCheckTimeoutInSeconds": 3600,
    "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
}


def expect_creation(aws, source=None, **variant):
    container = {"Image": IMAGE, "Environment": ENVIRONMENT} | ({"ModelDataSource": {"S3DataSource": source}} if source else {})
    variant = VARIANT | variant
    model = {"ModelName": "demo", "ExecutionRoleArn": ROLE, "PrimaryContainer": container}
    aws.sagemaker.add_response("create_model", {"ModelArn": ARN}, model)
    configuration = {"EndpointConfigName": "demo", "ProductionVariants": [variant]}
    aws.sagemaker.add_response("create_endpoint_config", {"EndpointConfigArn": ARN}, configuration)
    endpoint = {"EndpointName": "demo", "EndpointConfigName": "demo"}
    aws.sagemaker.add_response("create_endpoint", {"EndpointArn": ARN}, endpoint)


def add_status(aws, status, **more):
    endpoint = {"EndpointName": "demo", "EndpointArn": ARN, "EndpointStatus": status, "CreationTime": BEGAN}
    endpoint["EndpointConfigName"] = "demo"
    aws.sagemaker.add_response("describe_endpoint", endpoint | {"LastModifiedTime": BEGAN} | more, {"EndpointName": "demo"})


def add_log(aws, *lines, since_ms=BEGAN_MS, **more):
    events = [{"eventId": str(ms), "timestamp": BEGAN_MS + ms, "message": text} for ms, text in lines]
    token = {"nextToken": more.pop("after")} if "after" in more else {}
    asked = {"logGroupName": LOG, "startTime": since_ms} | token
    aws.logs.add_response("filter_log_events", {"events": events} | more, asked)


def settings():
    return [word for name, value in ENVIRONMENT.items() if name != "PORT" for word in ("--env", f"{name}={value}")]


def test_create_makes_the_three_resources_and_waits(aws, capsys):
    expect_creation(aws, SOURCE, VolumeSizeInGB=256, InferenceAmiVersion="al2-ami-sagemaker-inference-neuron-2")
    add_status(aws, "InService")
    add_log(aws)
    more = ["--model-data", "s3://bucket/llama", "--volume-gib", "256", "--ami", "al2-ami-sagemaker-inference-neuron-2"]
    assert deploy.main([*CREATE, *more, *settings()]) == 0
    assert capsys.readouterr().out == "demo: InService\n"


def test_an_archive_is_unpacked(aws):
    uri = "s3://bucket/model.tar.gz"
    expect_creation(aws, {"S3Uri": uri, "S3DataType": "S3Object", "CompressionType": "Gzip"}, InitialInstanceCount=2)
    assert deploy.main([*CREATE, "--model-data", uri, "--instances", "2", "--no-wait", *settings()]) == 0


def test_the_timeouts_of_a_start_are_sagemakers_most_unless_given(aws):
    timeouts = {"ModelDataDownloadTimeoutInSeconds": 600, "ContainerStartupHealthCheckTimeoutInSeconds": 60}
    expect_creation(aws, **timeouts)
    given = ["--download-timeout", "600", "--startup-timeout", "60"]
    assert deploy.main([*CREATE, *given, "--no-wait", *settings()]) == 0


@pytest.mark.parametrize("seconds", ["59", "3601", "1e3", "-1"])
def test_a_timeout_that_sagemaker_does_not_allow_is_refused(aws, capsys, seconds):
    with pytest.raises(SystemExit):
        deploy.main([*CREATE, f"--startup-timeout={seconds}"])
    assert f"{seconds!r} is not a number of seconds from 60 to 3600, SageMaker's limits" in capsys.readouterr().err


NEW = "demo-20261123-000000"


@pytest.fixture
def old(aws, monkeypatch):
    """An endpoint in service: its model and its configuration, as AWS describes them, with what `create` does not set."""
    monkeypatch.setattr(deploy.time, "gmtime", lambda: BEGAN.timetuple())
    container = {"Image": IMAGE, "Environment": ENVIRONMENT | {"HF_TOKEN": "old"}, "ModelDataSource": {"S3DataSource": SOURCE}}
    model = {"PrimaryContainer": container, "ExecutionRoleArn": ROLE, "EnableNetworkIsolation": True}
    capture = {
        "EnableCapture": True,
        "InitialSamplingPercentage": 5,
        "DestinationS3Uri": "s3://bucket/capture",
        "CaptureOptions": [{"CaptureMode": "Input"}],
    }
    configuration = {"ProductionVariants": [VARIANT | {"InitialInstanceCount": 2}], "DataCaptureConfig": capture}
    add_status(aws, "InService")
    described = {"EndpointConfigName": "demo", "EndpointConfigArn": ARN, "CreationTime": BEGAN}
    asked = {"EndpointConfigName": "demo"}
    aws.sagemaker.add_response("describe_endpoint_config", configuration | described, asked)
    described = {"ModelName": "demo", "ModelArn": ARN, "CreationTime": BEGAN}
    aws.sagemaker.add_response("describe_model", model | described, {"ModelName": "demo"})
    return types.SimpleNamespace(model=model, configuration=configuration)


def expect_update(aws, old, excluded=(), container=None, **variant):
    model = old.model | {"ModelName": NEW, "PrimaryContainer": old.model["PrimaryContainer"] | (container or {})}
    aws.sagemaker.add_response("create_model", {"ModelArn": ARN}, model)
    variants = [old.configuration["ProductionVariants"][0] | {"ModelName": NEW} | variant]
    configuration = old.configuration | {"EndpointConfigName": NEW, "ProductionVariants": variants}
    aws.sagemaker.add_response("create_endpoint_config", {"EndpointConfigArn": ARN}, configuration)
    asked = {"EndpointName": "demo", "EndpointConfigName": NEW, "RetainAllVariantProperties": True}
    asked["ExcludeRetainedVariantProperties"] = [{"VariantPropertyType": name} for name in excluded]
    aws.sagemaker.add_response("update_endpoint", {"EndpointArn": ARN}, asked)


def expect_deletion(aws, name):
    aws.sagemaker.add_response("delete_endpoint_config", {}, {"EndpointConfigName": name})
    aws.sagemaker.add_response("delete_model", {}, {"ModelName": name})


def test_update_changes_what_is_given_keeps_the_rest_and_removes_what_served_before(aws, old, capsys):
    environment = {"PORT": "8080", "MAX_BATCH_SIZE": "8", "MAX_CONCURRENT_REQUESTS": "4"}
    expect_update(aws, old, container={"Image": f"{IMAGE}-new", "Environment": environment})
    add_status(aws, "Updating")
    add_log(aws, (1, "loads"))
    add_status(aws, "InService", EndpointConfigName=NEW)
    add_log(aws, (1, "loads"))
    expect_deletion(aws, "demo")
    changes = ["--image", f"{IMAGE}-new", "--env", "MAX_BATCH_SIZE=8", "--env", "HF_TOKEN="]
    assert deploy.main(["update", "demo", *changes]) == 0
    assert capsys.readouterr().out.splitlines() == ["loads", "demo: Updating", "demo: InService"]


def test_update_changes_instances_and_the_model_data(aws, old):
    expect_update(
        aws,
        old,
        excluded=["DesiredInstanceCount"],
        container={"ModelDataSource": {"S3DataSource": SOURCE | {"S3Uri": "s3://bucket/other/"}}},
        InstanceType="ml.inf2.8xlarge",
        InitialInstanceCount=3,
        ContainerStartupHealthCheckTimeoutInSeconds=900,
    )
    add_status(aws, "InService", EndpointConfigName=NEW)
    add_log(aws)
    expect_deletion(aws, "demo")
    changes = ["--instance-type", "ml.inf2.8xlarge", "--instances", "3", "--startup-timeout", "900"]
    assert deploy.main(["update", "demo", *changes, "--model-data", "s3://bucket/other"]) == 0


def test_an_update_that_fails_leaves_what_served_before_and_removes_what_it_made(aws, old, capsys):
    expect_update(aws, old)
    add_status(aws, "RollingBack")
    add_log(aws)
    add_status(aws, "InService", FailureReason="The container did not pass the ping health check.")
    add_log(aws)
    expect_deletion(aws, NEW)
    assert deploy.main(["update", "demo"]) == 1
    error = "the update was rolled back, and demo serves as before: The container did not pass the ping health check."
    assert capsys.readouterr().err == f"error: {error}\n"


def test_an_update_that_aws_refuses_removes_what_it_made(aws, old, capsys):
    aws.sagemaker.add_response("create_model", {"ModelArn": ARN})
    aws.sagemaker.add_response("create_endpoint_config", {"EndpointConfigArn": ARN})
    aws.sagemaker.add_client_error("update_endpoint", "ValidationException", "deregister the scalable target first")
    expect_deletion(aws, NEW)
    assert deploy.main(["update", "demo", "--instance-type", "ml.inf2.8xlarge"]) == 1
    assert capsys.readouterr().err.endswith("deregister the scalable target first\n")


def test_an_endpoint_that_is_not_in_service_is_not_updated(aws, capsys):
    add_status(aws, "Updating")
    assert deploy.main(["update", "demo", "--image", IMAGE]) == 1
    assert capsys.readouterr().err == "error: demo is Updating; only an endpoint in service is updated\n"


def test_the_help_needs_no_boto3_and_the_rest_names_it():
    without = ["-S", str(ROOT / "deploy" / "sagemaker" / "deploy.py")]  # no installed package
    shown = subprocess.run([sys.executable, *without, "update", "--help"], capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "--startup-timeout" in shown.stdout
    refused = subprocess.run([sys.executable, *without, "wait", "demo"], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr) == (1, "error: this needs boto3: pip install boto3\n")


def test_wait_prints_each_line_of_the_log_once(aws, capsys):
    add_status(aws, "Creating")
    aws.logs.add_client_error("filter_log_events", "ResourceNotFoundException", "The specified log group does not exist.")
    add_status(aws, "Creating")
    add_log(aws, (1, "starts\n"), (2, "compiles"), nextToken="more")
    add_log(aws, (90_000, "loads"), after="more")
    add_status(aws, "InService")
    add_log(aws, (90_000, "loads"), (40_000, "late"), (90_001, "Connected"), since_ms=BEGAN_MS + 30_000)
    assert deploy.main(["wait", "demo"]) == 0
    printed = ["demo: Creating", "starts", "compiles", "loads", "late", "Connected", "demo: InService"]
    assert capsys.readouterr().out.splitlines() == printed


def test_an_endpoint_that_fails_is_an_error_with_its_reason(aws, capsys):
    add_status(aws, "Creating")
    add_log(aws)
    add_status(aws, "Failed", FailureReason="The container did not pass the ping health check.")
    add_log(aws, (1, "error: --max-batch-size '0': must be at least 1"))
    assert deploy.main(["wait", "demo"]) == 1
    printed = capsys.readouterr()
    assert "must be at least 1" in printed.out
    assert printed.err == "error: demo is Failed: The container did not pass the ping health check.\n"


def test_ctrl_c_ends_the_wait_without_a_traceback(aws, capsys, monkeypatch):
    def interrupt(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(deploy.time, "sleep", interrupt)
    add_status(aws, "Creating")
    add_log(aws)
    assert deploy.main(["wait", "demo"]) == 130
    assert capsys.readouterr().err == ""


def test_autoscale_follows_the_invocations_of_an_instance(aws):
    aws.autoscaling.add_response("register_scalable_target", {}, {**SCALED, "MinCapacity": 1, "MaxCapacity": 4})
    policy = {
        "TargetValue": 30.0,
        "PredefinedMetricSpecification": {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"},
        "ScaleOutCooldown": 300,
        "ScaleInCooldown": 600,
    }
    asked = {"PolicyName": "demo-invocations", "PolicyType": "TargetTrackingScaling"}
    asked["TargetTrackingScalingPolicyConfiguration"] = policy
    aws.autoscaling.add_response("put_scaling_policy", {"PolicyARN": ARN}, SCALED | asked)
    assert deploy.main(["autoscale", "demo", "--max", "4", "--invocations", "30"]) == 0


def add_description(aws, name):
    """Of an endpoint, and of its configuration."""
    add_status(aws, "InService", EndpointConfigName=name)
    described = {"EndpointConfigName": name, "EndpointConfigArn": ARN, "CreationTime": BEGAN}
    described["ProductionVariants"] = [VARIANT | {"ModelName": name}]
    aws.sagemaker.add_response("describe_endpoint_config", described, {"EndpointConfigName": name})


def test_delete_removes_what_the_last_update_made(aws, capsys):
    add_description(aws, NEW)
    aws.autoscaling.add_response("deregister_scalable_target", {}, SCALED)
    aws.sagemaker.add_response("delete_endpoint", {}, {"EndpointName": "demo"})
    expect_deletion(aws, NEW)
    assert deploy.main(["delete", "demo"]) == 0
    assert capsys.readouterr().out == "deleted: scaling target, endpoint, endpoint configuration, model\n"


def test_delete_removes_what_a_creation_that_failed_has_left(aws, capsys):
    aws.sagemaker.add_client_error("describe_endpoint", "ValidationException", 'Could not find endpoint "demo".')
    aws.autoscaling.add_client_error("deregister_scalable_target", "ObjectNotFoundException", "No scalable target found")
    aws.sagemaker.add_client_error("delete_endpoint", "ValidationException", 'Could not find endpoint "demo".')
    expect_deletion(aws, "demo")
    assert deploy.main(["delete", "demo"]) == 0
    assert capsys.readouterr().out == "deleted: endpoint configuration, model\n"


def test_delete_removes_what_is_there_and_says_so(aws, capsys):
    add_description(aws, "demo")
    aws.autoscaling.add_client_error("deregister_scalable_target", "ObjectNotFoundException", "No scalable target found")
    aws.sagemaker.add_response("delete_endpoint", {}, {"EndpointName": "demo"})
    aws.sagemaker.add_client_error("delete_endpoint_config", "ValidationException", "Could not find endpoint configuration")
    aws.sagemaker.add_response("delete_model", {}, {"ModelName": "demo"})
    assert deploy.main(["delete", "demo"]) == 0
    assert capsys.readouterr().out == "deleted: endpoint, model\n"


def test_an_error_of_aws_is_one_line_and_stops_what_follows(aws, capsys):
    add_description(aws, "demo")
    aws.autoscaling.add_response("deregister_scalable_target", {}, SCALED)
    aws.sagemaker.add_client_error("delete_endpoint", "ValidationException", "Cannot update in-progress endpoint")
    assert deploy.main(["delete", "demo"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith("Cannot update in-progress endpoint\n") and error.count("\n") == 1


@pytest.mark.parametrize("variable", ["MAX_BATCH_SIZE", "=1", "A B=1"])
def test_a_wrong_variable_is_refused_before_anything_is_created(aws, capsys, variable):
    with pytest.raises(SystemExit):
        deploy.main([*CREATE, "--env", variable])
    assert f"{variable!r} is not NAME=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("body", ["{", "[1]", "null"])
def test_a_body_that_is_no_object_is_refused_before_anything_is_sent(aws, capsys, body):
    with pytest.raises(SystemExit):
        deploy.main(["stream", "demo", "--body", body])
    assert f"{body!r} is not a JSON object" in capsys.readouterr().err


def test_an_empty_body_is_sent_as_it_is(aws):
    sent = {"EndpointName": "demo", "ContentType": "application/json", "Body": "{}"}
    aws.runtime.add_client_error("invoke_endpoint", "ModelError", expected_params=sent)
    assert deploy.main(["invoke", "demo", "--body", "{}"]) == 1


def unshares():
    return subprocess.run(["unshare", "--mount", "mount", "--bind", "/etc", "/etc"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def container():
    """The URL of the container, ready."""
    if not unshares():
        pytest.skip("needs a mount namespace: root, with unshare")
    cache = os.environ.get("MODEL_CACHE") or os.path.expanduser("~/.cache/neuron-textgen")
    started = {"command": ("unshare", "--mount", "sh", "-c", AS_A_CONTAINER), "MODEL_CACHE": cache, **ENVIRONMENT}
    with serving(port_name="SAGEMAKER_BIND_TO_PORT", **started) as url:
        yield url


@pytest.fixture
def endpoint(container, monkeypatch):
    """Makes boto3 find the container behind an endpoint of SageMaker's."""
    with shim(urlsplit(container).port) as url:
        keys = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in (keys | {"AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": url}).items():
            monkeypatch.setenv(name, value)
        yield


def get(url):
    with urllib.request.urlopen(url, timeout=20) as response:
        return response.status, response.read()


def test_the_container_serves_the_model_that_sagemaker_put_there(container):
    assert get(f"{container}/ping") == (200, b"")
    info = json.loads(get(f"{container}/info")[1])
    assert (info["model_id"], info["max_batch_size"]) == ("/opt/ml/model", 3)
    assert not (ROOT / "file").exists()


def test_stream_prints_the_text(endpoint, capsys):
    assert deploy.main(["stream", "demo", "--body", json.dumps(chat())]) == 0
    assert capsys.readouterr().out == CHAT_ANSWER + "\n"


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": QUESTION, "parameters": {"return_full_text": False}},
        {"prompt": QUESTION, "temperature": 0, "max_tokens": 100},
    ],
    ids=["native", "completion"],
)
def test_stream_prints_the_text_of_each_kind_of_body(endpoint, capsys, body):
    assert deploy.main(["stream", "demo", "--body", json.dumps(body)]) == 0
    assert capsys.readouterr().out == f" {CHAT_ANSWER}\n"


def test_invoke_prints_the_answer_to_a_prompt_as_json(endpoint, capsys):
    assert deploy.main(["invoke", "demo", QUESTION]) == 0
    assert json.loads(capsys.readouterr().out)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("verb", ["invoke", "stream"])
def test_an_error_of_the_server_is_one_line_with_its_status(endpoint, capsys, verb):
    assert deploy.main([verb, "demo", "--body", json.dumps(chat() | {"temperature": -1})]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: status 400: ") and "`temperature` must be >= 0.0" in error


def chat():
    return {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
