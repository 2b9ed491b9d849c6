"""Types that several APIs share: numbers with limits, the fields of sampling, and how JSON is written.

An API's own types are in its own file. msgspec parses the bodies of requests into such types, and
openapi.py describes them. In requests `null` means absent.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from protocol import SAMPLING_PARAMETERS, SamplingParameter

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
# `extra_json_schema` is for the OpenAPI document: the APIs check these limits, with TGI's error messages.
AtLeastOne = Annotated[U32, Meta(extra_json_schema={"minimum": 1})]
Positive = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0})]
NotNegative = Annotated[float, Meta(extra_json_schema={"minimum": 0})]
Share = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
U64_MAX = 2**64 - 1  # msgspec's constraints end at 63 bits
JsonSchema = dict[str, Any] | str  # a string holds the schema as JSON

SCHEMA = "#/components/schemas/{name}"  # where the OpenAPI document has the schema of a type

encode_json = msgspec.json.Encoder().encode


def _field(parameter: SamplingParameter) -> Any:
    """The type of a sampling parameter in a request, with its limits for the OpenAPI document."""
    limits = parameter.limits
    if parameter.is_filter:  # which may also be 0 in a greedy request
        limits = Meta(ge=limits.ge or 0, le=limits.le)
    bounds = msgspec.json.schema(Annotated[float, limits])
    del bounds["type"]
    kind = I32 if isinstance(parameter.neutral, int) else float
    return Annotated[kind, Meta(extra_json_schema=bounds)] | None


# Fields that native, chat and completion requests share.
SamplingFields = msgspec.defstruct(
    "SamplingFields",
    [(name, _field(parameter), None) for name, parameter in SAMPLING_PARAMETERS.items()]
    + [("seed", int | None, None)],
    module=__name__,
    kw_only=True,
)


class SamplingOptions(SamplingFields, kw_only=True):
    """Sampling fields of all of OpenAI's APIs here. Those from `min_tokens` on are vLLM's."""

    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None  # false: the text has them, but for the one that ends it
