"""Hooks of schemathesis for test_contract.py: what it sends is shorter, and nothing less is shown."""

import schemathesis

# Their bodies are those of other routes, or hold them.
OTHERS = {"/chat_tokenize", "/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/vertex"}
LENGTHS = ("max_tokens", "max_output_tokens", "max_new_tokens")
seen = set()


@schemathesis.hook
def filter_case(context, case):
    """For each field schemathesis has four or five values of a wrong type. These routes get the first; others get all."""
    what = case.meta.phase.data.description
    if case.path not in OTHERS or not what.endswith("Incorrect type"):
        return True
    place = (case.path, what)
    is_first = place not in seen
    seen.add(place)
    return is_first


@schemathesis.hook
def map_case(context, case):
    """The document's examples ask for 20 tokens."""
    if isinstance(case.body, dict):
        for asked in (case.body, case.body.get("parameters")):
            for name in LENGTHS:
                if isinstance(asked, dict) and asked.get(name) == 20:
                    asked[name] = 2
    return case
