"""Types that several dialects share: numbers with limits, the fields of sampling, and how JSON is written.

A dialect's own types are in its own file. msgspec parses the bodies of requests into such types, and
openapi.py describes them. In requests `null` means absent.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
# `extra_json_schema` is for the OpenAPI document: the dialects check these limits, with TGI's error messages.
AtLeastOne = Annotated[U32, Meta(extra_json_schema={"minimum": 1})]
Positive = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0})]
NotNegative = Annotated[float, Meta(extra_json_schema={"minimum": 0})]
Share = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})]
MinP = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
Penalty = Annotated[float, Meta(extra_json_schema={"minimum": -2, "maximum": 2})]
U64_MAX = 2**64 - 1  # msgspec's constraints end at 63 bits
JsonSchema = dict[str, Any] | str  # a string holds the schema as JSON

encode = msgspec.json.Encoder().encode


class SamplingFields(Struct, kw_only=True):
    """Fields that native, chat and completion requests share."""

    temperature: NotNegative | None = None
    top_k: I32 | None = None
    top_p: Share | None = None
    min_p: MinP | None = None
    repetition_penalty: Positive | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None
