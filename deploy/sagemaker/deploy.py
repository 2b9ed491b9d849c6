r"""An endpoint on SageMaker: create, wait, update, invoke, stream, autoscale, delete. Needs boto3 and AWS
credentials with a region.

    python3 deploy/sagemaker/deploy.py create NAME --image URI --role ARN --env MODEL_ID=... \
        --instance-type ml.inf2.xlarge
    python3 deploy/sagemaker/deploy.py stream NAME "What is Deep Learning?"

The SageMaker model, its endpoint configuration and its endpoint all have the name NAME; `update` makes a new
model and a new configuration, with a date behind the name.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator

try:
    import boto3
    from botocore.client import BaseClient
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
except ImportError:
    boto3 = None  # --help works without it

VARIANT = "AllTraffic"
PORT = "8080"  # where SageMaker sends requests; the image's own default is 80
LEAST_TIMEOUT_S, TIMEOUT_S = 60, 3600  # what SageMaker allows; a start on Neuron may download and compile
IN_PROGRESS = {"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"}
POLL_S = 10.0
LATE_MS = 60_000  # how much later than others a line may reach the log
SCALE_OUT_S, SCALE_IN_S = 300, 600  # a new instance needs minutes until it takes requests
MAX_TOKENS = 256  # of an answer to a prompt on the command line
NAME_LENGTH = 63  # of a model or a configuration
# What the descriptions of models and configurations have, and their creation does not take.
DESCRIPTIVE = {
    "ModelArn",
    "EndpointConfigArn",
    "CreationTime",
    "DeploymentRecommendation",
    "ResponseMetadata",
}


class DeployError(Exception):
    """What the user has to know, in one line."""


def create(
    sagemaker: BaseClient,
    name: str,
    *,
    image: str,
    role: str,
    environment: dict[str, str],
    model_data: str | None = None,
    **variant: str | int | None,
) -> None:
    """Creates the model, the configuration and the endpoint. Raises ClientError; what was created until then
    stays.

    `environment`: the server's settings. `model_data`: an S3 folder, or a .tar.gz, that SageMaker puts into
    /opt/ml/model. `variant`: values for VARIANT_FIELDS, of which `instance_type` is needed;
    None leaves SageMaker's own.
    """
    container = {"Image": image, "Environment": {"PORT": PORT} | environment}
    if model_data:
        container["ModelDataSource"] = _source(model_data)
    fields = {
        "VariantName": VARIANT,
        "ModelName": name,
        "InitialInstanceCount": 1,
        "ModelDataDownloadTimeoutInSeconds": TIMEOUT_S,
        "ContainerStartupHealthCheckTimeoutInSeconds": TIMEOUT_S,
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    fields |= _given(variant)
    sagemaker.create_model(ModelName=name, ExecutionRoleArn=role, PrimaryContainer=container)
    sagemaker.create_endpoint_config(EndpointConfigName=name, ProductionVariants=[fields])
    sagemaker.create_endpoint(EndpointName=name, EndpointConfigName=name)


# Options of the command line, and what they are in a variant of an endpoint configuration. `ami` is
# SageMaker's name for the system and the driver of the instance.
VARIANT_FIELDS = {
    "instance_type": "InstanceType",
    "instances": "InitialInstanceCount",
    "volume_gib": "VolumeSizeInGB",
    "ami": "InferenceAmiVersion",
    "download_timeout": "ModelDataDownloadTimeoutInSeconds",
    "startup_timeout": "ContainerStartupHealthCheckTimeoutInSeconds",
}


def _given(variant: dict[str, str | int | None]) -> dict[str, str | int]:
    return {VARIANT_FIELDS[name]: value for name, value in variant.items() if value is not None}


def _source(model_data: str) -> dict[str, dict[str, str]]:
    if model_data.endswith(".tar.gz"):
        source = {"S3Uri": model_data, "S3DataType": "S3Object", "CompressionType": "Gzip"}
    else:
        source = {"S3Uri": model_data.rstrip("/") + "/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    return {"S3DataSource": source}


def update(
    sagemaker: BaseClient,
    logs: BaseClient,
    name: str,
    *,
    image: str | None = None,
    role: str | None = None,
    environment: dict[str, str],
    model_data: str | None = None,
    **variant: str | int | None,
) -> None:
    """Gives the endpoint a new model and a new configuration, and waits until they serve; what is not given
    stays, and an empty setting of `environment` is removed. Until then, and where it fails, the old ones
    serve. What serves no more is deleted. Raises ClientError and DeployError.
    """
    old_name = _configuration_of(sagemaker, name)
    configuration = _described(sagemaker.describe_endpoint_config(EndpointConfigName=old_name))
    if len(configuration["ProductionVariants"]) != 1:
        raise DeployError(f"{name} has several variants; `update` changes what `create` made")
    (fields,) = configuration["ProductionVariants"]
    old_model = fields["ModelName"]
    model = _described(sagemaker.describe_model(ModelName=old_model))
    container = model["PrimaryContainer"]
    settings = container.get("Environment", {}) | environment
    container["Environment"] = {key: value for key, value in settings.items() if value}
    if image:
        container["Image"] = image
    if model_data:
        container["ModelDataSource"] = _source(model_data)
        container.pop("ModelDataUrl", None)
    if role:
        model["ExecutionRoleArn"] = role
    new_name = name[: NAME_LENGTH - 16].rstrip("-") + time.strftime("-%Y%m%d-%H%M%S", time.gmtime())
    fields |= _given(variant) | {"ModelName": new_name}
    # Autoscaling may have changed the number of instances.
    excluded = [{"VariantPropertyType": "DesiredInstanceCount"}] if variant.get("instances") else []
    sagemaker.create_model(**model | {"ModelName": new_name})
    try:
        sagemaker.create_endpoint_config(**configuration | {"EndpointConfigName": new_name})
        sagemaker.update_endpoint(
            EndpointName=name,
            EndpointConfigName=new_name,
            RetainAllVariantProperties=True,
            ExcludeRetainedVariantProperties=excluded,
        )
    except ClientError:
        _delete_unused(sagemaker, new_name, new_name)
        raise
    endpoint = wait(sagemaker, logs, name)
    if endpoint["EndpointConfigName"] != new_name:
        _delete_unused(sagemaker, new_name, new_name)
        reason = endpoint.get("FailureReason", "no reason given")
        raise DeployError(f"the update was rolled back, and {name} serves as before: {reason}")
    _delete_unused(sagemaker, old_name, old_model)


def _configuration_of(sagemaker: BaseClient, name: str) -> str:
    endpoint = sagemaker.describe_endpoint(EndpointName=name)
    if endpoint["EndpointStatus"] != "InService":
        raise DeployError(f"{name} is {endpoint['EndpointStatus']}; only an endpoint in service is updated")
    return endpoint["EndpointConfigName"]


def _described(description: dict) -> dict:
    """What a description says, as its creation takes it."""
    return {key: value for key, value in description.items() if key not in DESCRIPTIVE}


def _delete_unused(sagemaker: BaseClient, configuration: str, model: str) -> None:
    _delete(
        {
            "configuration": lambda: sagemaker.delete_endpoint_config(EndpointConfigName=configuration),
            "model": lambda: sagemaker.delete_model(ModelName=model),
        }
    )


def wait(sagemaker: BaseClient, logs: BaseClient, name: str) -> dict:
    """Waits until the endpoint takes requests, and prints its status and its containers' log meanwhile;
    returns its description. Raises DeployError with SageMaker's reason when it fails."""
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
    return endpoint


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
    """Removes everything that `create`, `update` and `autoscale` made; returns the names of what was
    there."""
    configuration, model = _used_by(sagemaker, name)
    return _delete(
        {
            # With its policies.
            "scaling target": lambda: autoscaling.deregister_scalable_target(**_scalable(name)),
            "endpoint": lambda: sagemaker.delete_endpoint(EndpointName=name),
            "endpoint configuration": lambda: sagemaker.delete_endpoint_config(
                EndpointConfigName=configuration
            ),
            "model": lambda: sagemaker.delete_model(ModelName=model),
        }
    )


def _used_by(sagemaker: BaseClient, name: str) -> tuple[str, str]:
    """The configuration and the model of an endpoint; NAME for those that are not found."""
    configuration = model = name
    try:
        configuration = sagemaker.describe_endpoint(EndpointName=name)["EndpointConfigName"]
        description = sagemaker.describe_endpoint_config(EndpointConfigName=configuration)
        model = description["ProductionVariants"][0]["ModelName"]
    except ClientError as error:
        if not _is_missing(error):
            raise
    return configuration, model


def _delete(steps: dict[str, Callable]) -> list[str]:
    """Which of the steps found something to delete."""
    deleted = []
    for what, step in steps.items():
        try:
            step()
            deleted.append(what)
        except ClientError as error:
            if not _is_missing(error):
                raise
    return deleted


def _is_missing(error: ClientError) -> bool:
    code = error.response["Error"]["Code"]
    return code == "ObjectNotFoundException" or error.response["Error"]["Message"].startswith(
        "Could not find"
    )


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


def _timeout(text: str) -> int:
    if not text.isdecimal() or not LEAST_TIMEOUT_S <= int(text) <= TIMEOUT_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds from {LEAST_TIMEOUT_S} to {TIMEOUT_S}, SageMaker's limits"
        )
    return int(text)


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
    subcommands = parser.add_subparsers(dest="subcommand", required=True)

    def subcommand(name: str, help: str) -> argparse.ArgumentParser:
        added = subcommands.add_parser(name, help=help, description=help)
        added.add_argument("name", metavar="NAME", help="the endpoint")
        return added

    added = subcommand("create", "create an endpoint and wait until it takes requests")
    _add_deployment(added, is_new=True)
    added.add_argument("--no-wait", action="store_true", help="return at once")
    added = subcommand("update", "change a running endpoint, which serves meanwhile; what is not given stays")
    _add_deployment(added, is_new=False)
    subcommand("wait", "wait until an endpoint takes requests; prints its log")
    for name, help in (
        ("invoke", "print the complete response as JSON"),
        ("stream", "print the text as it is generated"),
    ):
        body = subcommand(name, help).add_mutually_exclusive_group(required=True)
        body.add_argument("prompt", nargs="?", metavar="PROMPT", help="a message to the model, as a chat")
        body.add_argument("--body", type=_body, metavar="JSON", help="any body that /invocations takes")
    added = subcommand("autoscale", "change the number of instances with the load")
    added.add_argument("--min", type=int, default=1, metavar="N", help="1 if not set")
    added.add_argument("--max", type=int, required=True, metavar="N")
    added.add_argument(
        "--invocations", type=float, required=True, metavar="N", help="per instance and minute"
    )
    subcommand("delete", "remove the endpoint, its configuration, its model and its scaling")
    return parser.parse_args(argv)


def _add_deployment(subcommand: argparse.ArgumentParser, is_new: bool) -> None:
    """The options that say what runs, and on what."""
    subcommand.add_argument("--image", required=is_new, metavar="URI", help="the image in ECR")
    subcommand.add_argument(
        "--role", required=is_new, metavar="ARN", help="the role that reads the image and the model"
    )
    subcommand.add_argument(
        "--instance-type", required=is_new, metavar="TYPE", help="for example ml.inf2.xlarge"
    )
    subcommand.add_argument("--instances", type=int, metavar="N", help="1 if not set" if is_new else None)
    subcommand.add_argument(
        "--volume-gib", type=int, metavar="N", help="disk, where the instance type has none of its own"
    )
    subcommand.add_argument(
        "--ami",
        metavar="VERSION",
        help="another driver: al2-ami-sagemaker-inference-neuron-2 has Neuron's 2.19",
    )
    subcommand.add_argument(
        "--model-data",
        metavar="S3",
        help="s3://bucket/folder/ or s3://bucket/model.tar.gz, for /opt/ml/model",
    )
    subcommand.add_argument(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting; repeatable" if is_new else "a setting; repeatable; NAME= removes it",
    )
    default = f"; {TIMEOUT_S} if not set" if is_new else ""
    subcommand.add_argument(
        "--download-timeout",
        type=_timeout,
        metavar="S",
        help=f"seconds for SageMaker to download the model data{default}",
    )
    subcommand.add_argument(
        "--startup-timeout",
        type=_timeout,
        metavar="S",
        help=f"seconds until the server must be ready{default}",
    )


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
    if arguments.subcommand in ("create", "update"):
        given = {key: getattr(arguments, key) for key in ("image", "role", "model_data", *VARIANT_FIELDS)}
        environment = dict(arguments.env)
    if arguments.subcommand == "create":
        create(sagemaker, name, **given, environment=environment)
    if arguments.subcommand == "update":
        update(sagemaker, boto3.client("logs"), name, **given, environment=environment)
    elif arguments.subcommand == "wait" or (arguments.subcommand == "create" and not arguments.no_wait):
        wait(sagemaker, boto3.client("logs"), name)
    elif arguments.subcommand in ("invoke", "stream"):
        chat = {"messages": [{"role": "user", "content": arguments.prompt}], "max_tokens": MAX_TOKENS}
        body = chat if arguments.body is None else arguments.body
        if arguments.subcommand == "invoke":
            print(json.dumps(invoke(runtime, name, body), indent=1, ensure_ascii=False))
        else:
            for event in stream(runtime, name, body):
                print(text_of(event), end="", flush=True)
            print()
    elif arguments.subcommand == "autoscale":
        autoscale(autoscaling, name, arguments.min, arguments.max, arguments.invocations)
    elif arguments.subcommand == "delete":
        deleted = ", ".join(delete(sagemaker, autoscaling, name))
        print(f"deleted: {deleted or 'nothing; there was nothing of that name'}")


def main(argv: list[str]) -> int:
    arguments = _arguments(argv)
    if boto3 is None:
        print("error: this needs boto3: pip install boto3", file=sys.stderr)
        return 1
    try:
        _run(arguments)
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
