"""Tools that an API defines and the client runs: what each does, and the schema of its arguments.

anthropic/tools.py and openai/responses_tools.py have the tables of their types. Sources: the types of
Anthropic's and OpenAI's SDKs and their documentation of these tools; the descriptions are this server's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from api.http.fields import Json, require

TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
BOOLEAN = {"type": "boolean"}
TEXT_LIST = {"type": "array", "items": TEXT}
POINT = {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 2}
NO_UNDO = "20250429"  # the first text editor without `undo_edit`; the text of its `insert` is `insert_text`
EDITOR_COMMANDS = ("view", "create", "str_replace", "insert")
# What the types of tools for a computer or a browser begin with, in both APIs.
COMPUTER_USE = ("computer", "browser_toolset")


def reject_computer_use(path: str, tool: Json) -> None:
    """Raises ApiError for a tool with which the model would use a computer or a browser."""
    kind = str(tool.get("type"))
    detail = "is not supported: this server has no computer or browser use; leave this tool out"
    require(not kind.startswith(COMPUTER_USE), f"{path}.type", detail, given=kind[:40])


def _definition(description: str, required: str, **properties: Json | str) -> Json:
    """Returns the `description` of a tool, and its `parameters`: the JSON schema of its arguments.

    required: the names of arguments, with spaces between them. properties: each argument by its name, as its
    own schema, or as the description of a text.
    """
    schemas = {
        name: _with(TEXT, given) if isinstance(given, str) else given for name, given in properties.items()
    }
    parameters = {"type": "object", "properties": schemas, "required": required.split()}
    return {"description": description, "parameters": parameters}


def _enum(values: Sequence[str]) -> Json:
    return {"type": "string", "enum": list(values)}


def _with(schema: Json, description: str) -> Json:
    return schema | {"description": description}


def text_editor(date: str, tool: Json) -> Json:
    """Returns the definition of Anthropic's text editor. date: that of its version, such as `20250429`; older
    ones have `undo_edit`, and another name for the text of `insert`. tool: as the request has it; only
    `max_characters` counts."""
    is_old = date < NO_UNDO
    commands = list(EDITOR_COMMANDS)
    text = "Shows and changes text files."
    if is_old:
        commands.append("undo_edit")
        text += " `undo_edit` takes back the last change of a file."
    if tool.get("max_characters") is not None:
        text += f" `view` shows at most {tool['max_characters']} characters."
    properties = _editing("new_str" if is_old else "insert_text")
    return _definition(text, "command path", command=_enum(commands), **properties)


def _editing(inserted: str) -> dict[str, Json | str]:
    """Returns the arguments of commands that edit a file, by name, as `_definition` takes them. inserted: the
    name of the argument that has the text of `insert`, which may also be `new_str`."""
    properties = {
        "path": "The absolute path of the file, or of a folder to view.",
        "view_range": _with(POINT, "`view`: the first and the last line, from 1; -1: to the end."),
        "file_text": "`create`: the content of the new file.",
        "old_str": "`str_replace`: the text to replace, which occurs exactly once.",
        "new_str": "`str_replace`: the text in its place.",
        "insert_line": _with(INTEGER, "`insert`: the line after which to insert; 0: at the beginning."),
    }
    text = "`insert`: the text to insert."
    if inserted in properties:
        text = f"{properties[inserted]} {text}"
    return properties | {inserted: text}


# Anthropic's.
BASH = _definition(
    "Runs a command in a bash session, which keeps its state from one call to the next.",
    "",
    command="The command. It may be left out only to restart.",
    restart=_with(BOOLEAN, "true: ends the session and starts a new one."),
)
MEMORY = _definition(
    "Keeps notes in files below /memories, which last longer than this conversation. "
    "View that folder before you begin, and write down what later conversations need.",
    "command",
    command=_enum([*EDITOR_COMMANDS, "delete", "rename"]),
    **_editing("insert_text"),
    old_path="`rename`: the path until now.",
    new_path="`rename`: the new path.",
)
# OpenAI's.
SHELL = _definition(
    "Runs shell commands on the user's machine, and returns the output of each.",
    "commands",
    commands=_with(TEXT_LIST, "Commands, each of which runs by itself."),
    timeout_ms=_with(INTEGER, "Milliseconds after which they are ended."),
    max_output_length=_with(INTEGER, "Characters of output to return."),
)
LOCAL_SHELL = _definition(
    "Runs a command on the user's machine, and returns its output.",
    "command",
    command=_with(TEXT_LIST, 'The program and its arguments, such as ["bash", "-lc", "ls | wc -l"].'),
    working_directory="The folder to run it in.",
    env=_with({"type": "object", "additionalProperties": TEXT}, "Environment variables."),
    timeout_ms=_with(INTEGER, "Milliseconds after which it is ended."),
)
APPLY_PATCH = _definition(
    "Creates, changes or deletes one file.",
    "type path",
    type=_enum(["create_file", "update_file", "delete_file"]),
    path="The file.",
    diff=(
        "`create_file`: each line of the new file after a `+`. `update_file`: for each change a line "
        "`@@`, then the lines around it after a space, those that go after a `-`, and new ones after "
        "a `+`. `delete_file` has none."
    ),
)
# A request may bring a description and parameters of its own.
TOOL_SEARCH = _definition(
    "Finds more tools, which may be called afterwards.",
    "query",
    query="Words for what the tool should do.",
)
