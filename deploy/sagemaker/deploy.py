r"""An endpoint on SageMaker: create, wait, invoke, stream, autoscale, delete. Needs boto3 and AWS credentials
with a region.

    python3 deploy/sagemaker/deploy.py create NAME --image URI --role ARN --env MODEL_ID=... \
        --instance-type ml.inf2.xlarge
    python3 deploy/sagemaker/deploy.py stream NAME "What is Deep Learning?"

The SageMaker model, its endpoint configuration and its endpoint all have the name NAME.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator

import boto3
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

VARIANT = "AllTraffic"
PORT = "8080"  # where SageMaker sends requests; the image's own default is 80
TIMEOUT_S = 3600  # the most that SageMaker allows: a start on Neuron may download and compile
IN_PROGRESS = {"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"}
POLL_S = 10.0
LATE_MS = 60_000  # how much later than others a line may reach the log
SCALE_OUT_S, SCALE_IN_S = 300, 600  # a new instance needs minutes until it takes requests
MAX_TOKENS = 256  # of an answer to a prompt on the command line


class DeployError(Exception):
    """What the user has to know, in one line."""


def create(
    sagemaker: BaseClient,
    name: str,
    *,
    image: str,
    role: str,
    instance_type: str,
    instances: int = 1,
    volume_gib: int | None = None,
    ami: str | None = None,
    model_data: str | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    """Creates the model, the configuration and the endpoint. Raises ClientError; what was created until then
    stays.

    `environment`: the server's settings. `model_data`: an S3 folder, or a .tar.gz, that SageMaker puts into
    /opt/ml/model. `ami`: SageMaker's name for the system and the driver of the instance.
    """
    container = {"Image": image, "Environment": {"PORT": PORT} | (environment or {})}
    if model_data and model_data.endswith(".tar.gz"):
        source = {"S3Uri": model_data, "S3DataType": "S3Object", "CompressionType": "Gzip"}
    elif model_data:
        source = {"S3Uri": model_data.rstrip("/") + "/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    if model_data:
        container["ModelDataSource"] = {"S3DataSource": source}
    variant = {
        "VariantName": VARIANT,
        "ModelName": name,
        "InstanceType": instance_type,
        "InitialInstanceCount": instances,
        "ModelDataDownloadTimeoutInSeconds": TIMEOUT_S,
        "ContainerStartupHealthCheckTimeoutInSeconds": TIMEOUT_S,
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    if volume_gib:
        variant["VolumeSizeInGB"] = volume_gib
    if ami:
        variant["InferenceAmiVersion"] = ami
    sagemaker.create_model(ModelName=name, ExecutionRoleArn=role, PrimaryContainer=container)
    sagemaker.create_endpoint_config(EndpointConfigName=name, ProductionVariants=[variant])
    sagemaker.create_endpoint(EndpointName=name, EndpointConfigName=name)


def wait(sagemaker: BaseClient, logs: BaseClient, name: str) -> None:
    """Waits until the endpoint takes requests, and prints its status and its containers' log meanwhile.
    Raises DeployError with SageMaker's reason when it fails."""
    tail, shown = None, None
    while True:
        endpoint = sagemaker.describe_endpoint(EndpointName=name)
        tail = tail or LogTail(logs, name, int(endpoint["LastModifiedTime"].timestamp() * 1000))
        for line in tail.new_lines():
            print(line, flush=True)
        status = endpoint["EndpointStatus"]
        if status != shown:
            print(f"{name}: {status}", flush=True)
        if status not in IN_PROGRESS:
            break
        shown = status
        time.sleep(POLL_S)
    if status != "InService":
        raise DeployError(f"{name} is {status}: {endpoint.get('FailureReason', 'no reason given')}")


class LogTail:
    """The log of an endpoint's containers, each line once."""

    def __init__(self, logs: BaseClient, name: str, since_ms: int):
        self._logs = logs
        self._group = f"/aws/sagemaker/Endpoints/{name}"
        self._since_ms = since_ms
        self._seen: set[str] = set()

    def new_lines(self) -> Iterator[str]:
        pages = self._logs.get_paginator("filter_log_events").paginate(
            logGroupName=self._group, startTime=self._since_ms
        )
        try:
            events = [event for page in pages for event in page["events"]]
        except self._logs.exceptions.ResourceNotFoundException:  # until the first container writes a line
            return
        for event in events:
            if event["eventId"] not in self._seen:
                self._seen.add(event["eventId"])
                yield event["message"].rstrip()
            self._since_ms = max(self._since_ms, event["timestamp"] - LATE_MS)


def invoke(runtime: BaseClient, name: str, body: dict) -> dict | list:
    """The server's answer to `body`, which is any that /invocations takes. SageMaker waits 60 s; after 55 the
    server answers with the text so far."""
    response = runtime.invoke_endpoint(
        EndpointName=name, ContentType="application/json", Body=json.dumps(body)
    )
    return json.load(response["Body"])


def stream(runtime: BaseClient, name: str, body: dict) -> Iterator[dict]:
    """The server's events, as they come."""
    response = runtime.invoke_endpoint_with_response_stream(
        EndpointName=name, ContentType="application/json", Body=json.dumps(body | {"stream": True})
    )
    rest = b""
    for part in response["Body"]:  # SageMaker cuts events, and characters, anywhere
        *lines, rest = (rest + part["PayloadPart"]["Bytes"]).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def text_of(event: dict) -> str:
    """What an event adds to the text: of a chat, a completion or TGI's stream. Raises DeployError for the
    event of an error."""
    if "error" in event:
        error = event["error"]
        raise DeployError(error["message"] if isinstance(error, dict) else error)
    if "token" in event:
        return "" if event["token"]["special"] else event["token"]["text"]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"]
    )


def autoscale(autoscaling: BaseClient, name: str, least: int, most: int, invocations: float) -> None:
    """Keeps between `least` and `most` instances, as many as give each `invocations` per minute."""
    resource = _scalable(name)
    autoscaling.register_scalable_target(**resource, MinCapacity=least, MaxCapacity=most)
    autoscaling.put_scaling_policy(
        **resource,
        PolicyName=f"{name}-invocations",
        PolicyType="TargetTrackingScaling",
        TargetTrackingScalingPolicyConfiguration={
            "TargetValue": invocations,
            "PredefinedMetricSpecification": {
                "PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"
            },
            "ScaleOutCooldown": SCALE_OUT_S,
            "ScaleInCooldown": SCALE_IN_S,
        },
    )


def delete(sagemaker: BaseClient, autoscaling: BaseClient, name: str) -> list[str]:
    """Removes everything that `create` and `autoscale` made; returns the names of what was there."""
    steps: dict[str, Callable] = {
        "scaling target": lambda: autoscaling.deregister_scalable_target(
            **_scalable(name)
        ),  # with its policies
        "endpoint": lambda: sagemaker.delete_endpoint(EndpointName=name),
        "endpoint configuration": lambda: sagemaker.delete_endpoint_config(EndpointConfigName=name),
        "model": lambda: sagemaker.delete_model(ModelName=name),
    }
    deleted = []
    for what, step in steps.items():
        try:
            step()
            deleted.append(what)
        except ClientError as error:
            code, message = error.response["Error"]["Code"], error.response["Error"]["Message"]
            if code != "ObjectNotFoundException" and not message.startswith("Could not find"):
                raise
    return deleted


def _scalable(name: str) -> dict[str, str]:
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{name}/variant/{VARIANT}",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }


def _variable(text: str) -> tuple[str, str]:
    name, is_set, value = text.partition("=")
    if not is_set or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _body(text: str) -> dict:
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return body


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, help: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=help, description=help)
        added.add_argument("name", metavar="NAME", help="the endpoint")
        return added

    added = verb("create", "create an endpoint and wait until it takes requests")
    added.add_argument("--image", required=True, metavar="URI", help="the image in ECR")
    added.add_argument(
        "--role", required=True, metavar="ARN", help="the role that reads the image and the model"
    )
    added.add_argument("--instance-type", required=True, metavar="TYPE", help="for example ml.inf2.xlarge")
    added.add_argument("--instances", type=int, default=1, metavar="N", help="1 if not set")
    added.add_argument(
        "--volume-gib", type=int, metavar="N", help="disk, where the instance type has none of its own"
    )
    added.add_argument(
        "--ami",
        metavar="VERSION",
        help="another driver: al2-ami-sagemaker-inference-neuron-2 has Neuron's 2.19",
    )
    added.add_argument(
        "--model-data",
        metavar="S3",
        help="s3://bucket/folder/ or s3://bucket/model.tar.gz, for /opt/ml/model",
    )
    added.add_argument(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting; repeatable",
    )
    added.add_argument("--no-wait", action="store_true", help="return at once")
    verb("wait", "wait until an endpoint takes requests; prints its log")
    for name, help in (
        ("invoke", "print the whole answer, as JSON"),
        ("stream", "print the text as it is generated"),
    ):
        body = verb(name, help).add_mutually_exclusive_group(required=True)
        body.add_argument("prompt", nargs="?", metavar="PROMPT", help="a message to the model, as a chat")
        body.add_argument("--body", type=_body, metavar="JSON", help="any body that /invocations takes")
    added = verb("autoscale", "change the number of instances with the load")
    added.add_argument("--min", type=int, default=1, metavar="N", help="1 if not set")
    added.add_argument("--max", type=int, required=True, metavar="N")
    added.add_argument(
        "--invocations", type=float, required=True, metavar="N", help="per instance and minute"
    )
    verb("delete", "remove the endpoint, its configuration, its model and its scaling")
    return parser.parse_args(argv)


def _run(arguments: argparse.Namespace) -> None:
    name, sagemaker, autoscaling = (
        arguments.name,
        boto3.client("sagemaker"),
        boto3.client("application-autoscaling"),
    )
    # An answer that is not streamed may take 60 s; a second try would generate it again.
    runtime = boto3.client(
        "sagemaker-runtime", config=Config(read_timeout=75, retries={"total_max_attempts": 1})
    )
    if arguments.verb == "create":
        given = {
            key: getattr(arguments, key)
            for key in ("image", "role", "instance_type", "instances", "volume_gib", "ami")
        }
        create(sagemaker, name, **given, model_data=arguments.model_data, environment=dict(arguments.env))
    if arguments.verb == "wait" or (arguments.verb == "create" and not arguments.no_wait):
        wait(sagemaker, boto3.client("logs"), name)
    elif arguments.verb in ("invoke", "stream"):
        chat = {"messages": [{"role": "user", "content": arguments.prompt}], "max_tokens": MAX_TOKENS}
        body = chat if arguments.body is None else arguments.body
        if arguments.verb == "invoke":
            print(json.dumps(invoke(runtime, name, body), indent=1, ensure_ascii=False))
        else:
            for event in stream(runtime, name, body):
                print(text_of(event), end="", flush=True)
            print()
    elif arguments.verb == "autoscale":
        autoscale(autoscaling, name, arguments.min, arguments.max, arguments.invocations)
    elif arguments.verb == "delete":
        deleted = ", ".join(delete(sagemaker, autoscaling, name))
        print(f"deleted: {deleted or 'nothing; there was nothing of that name'}")


def main(argv: list[str]) -> int:
    try:
        _run(_arguments(argv))
    except ClientError as error:
        answer = error.response
        if "OriginalMessage" in answer:  # the server's own
            error = f"status {answer['OriginalStatusCode']}: {answer['OriginalMessage']}"
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (BotoCoreError, DeployError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the endpoint stays; `wait` shows its log again
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
