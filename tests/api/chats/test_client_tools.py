"""Tools that an API defines and the client runs: every format of calls can write and enforce them."""

import pytest
from asked import grammars
from tool_calls import FORMATS, use

from api.anthropic.tools import CLIENT_TOOLS
from api.openai.responses_tools import BUILT_IN

DEFINITIONS = {name: row.definition({"parameters": None}) for name, row in BUILT_IN.items()}
for name, definition in CLIENT_TOOLS.items():
    for date in ("20241022", "20260801"):
        DEFINITIONS[f"{name}_{date}"] = definition(date, {})


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_can_enforce_the_schema_of_every_tool(form):
    for name, definition in DEFINITIONS.items():
        function = {"name": name, **definition._asdict()}
        policy = use(form, [{"type": "function", "function": function}], "required")
        grammars().compile(policy.grammar)


def test_every_description_and_schema_is_complete():
    for name, definition in DEFINITIONS.items():
        properties = definition.parameters["properties"]
        assert properties and set(definition.parameters["required"]) <= properties.keys(), name
        assert definition.description.endswith((".", ").")), name
