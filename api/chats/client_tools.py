"""Tools that an API defines and the client runs: what each does, and the schema of its arguments.

messages.py and responses.py have the tables of their types. Sources: the types of Anthropic's and OpenAI's
SDKs and their documentation of these tools; the descriptions are this server's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from api.chats.content import needed
from api.http.fields import Json

TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
BOOLEAN = {"type": "boolean"}
TEXTS = {"type": "array", "items": TEXT}
POINT = {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 2}
BOX = {"type": "array", "items": INTEGER, "minItems": 4, "maxItems": 4}
SCROLL_DIRECTION = {"type": "string", "enum": ["up", "down", "left", "right"]}
NO_UNDO = "20250429"  # the first text editor without `undo_edit`; the text of its `insert` is `insert_text`
MORE_ACTIONS = "20250124"  # the first computer that scrolls and waits
EDITOR_COMMANDS = ("view", "create", "str_replace", "insert")
ACTIONS = (
    "key",
    "type",
    "mouse_move",
    "left_click",
    "left_click_drag",
    "right_click",
    "middle_click",
    "double_click",
    "screenshot",
    "cursor_position",
)
# Without left_click_drag: its argument `from` is no name for models that write calls in Python.
BROWSER_ACTIONS = (
    "navigate",
    "list_tabs",
    "new_tab",
    "switch_tab",
    "close_tab",
    "read_page",
    "get_page_text",
    "read_console",
    "read_network",
    "find",
    "form_input",
    "file_upload",
    "scroll_to",
    "screenshot",
    "zoom",
    "left_click",
    "right_click",
    "middle_click",
    "double_click",
    "triple_click",
    "hover",
    "left_mouse_down",
    "left_mouse_up",
    "mouse_move",
    "scroll",
    "type",
    "key",
    "hold_key",
    "wait",
    "javascript_exec",
)
LATER_ACTIONS = ("left_mouse_down", "left_mouse_up", "triple_click", "scroll", "hold_key", "wait")


class Definition(NamedTuple):
    """What a tool does, and the JSON schema of its arguments."""

    description: str
    parameters: Json


def _object(required: str, **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": required.split()}


def _choice(values: Sequence[str]) -> Json:
    return {"type": "string", "enum": list(values)}


def _with(schema: Json, description: str) -> Json:
    return schema | {"description": description}


# Anthropic's, each by the date of its version, the tool of the request and its path there.


def bash(_date: str, _path: str, _tool: Json) -> Definition:
    return Definition(
        "Runs a command in a bash session, which keeps its state from one call to the next.",
        _object(
            "",
            command=_with(TEXT, "The command. It may be left out only to restart."),
            restart=_with(BOOLEAN, "true: ends the session and starts a new one."),
        ),
    )


def text_editor(date: str, _path: str, tool: Json) -> Definition:
    is_old = date < NO_UNDO
    commands = list(EDITOR_COMMANDS)
    text = "Shows and changes text files."
    if is_old:
        commands.append("undo_edit")
        text += " `undo_edit` takes back the last change of a file."
    if tool.get("max_characters") is not None:
        text += f" `view` shows at most {tool['max_characters']} characters."
    properties = _editing("new_str" if is_old else "insert_text")
    return Definition(text, _object("command path", command=_choice(commands), **properties))


def memory(_date: str, _path: str, _tool: Json) -> Definition:
    commands = [*EDITOR_COMMANDS, "delete", "rename"]
    return Definition(
        "Keeps notes in files below /memories, which last longer than this conversation. "
        "View that folder before you begin, and write down what later conversations need.",
        _object(
            "command",
            command=_choice(commands),
            **_editing("insert_text"),
            old_path=_with(TEXT, "`rename`: the path until now."),
            new_path=_with(TEXT, "`rename`: the new path."),
        ),
    )


def _editing(inserted: str) -> dict[str, Json]:
    """The arguments of commands that edit a file. `inserted` has the text of `insert`."""
    properties = {
        "path": _with(TEXT, "The absolute path of the file, or of a folder to view."),
        "view_range": _with(POINT, "`view`: the first and the last line, from 1; -1: to the end."),
        "file_text": _with(TEXT, "`create`: the content of the new file."),
        "old_str": _with(TEXT, "`str_replace`: the text to replace, which occurs exactly once."),
        "new_str": _with(TEXT, "`str_replace`: the text in its place."),
        "insert_line": _with(INTEGER, "`insert`: the line after which to insert; 0: at the beginning."),
    }
    text = "`insert`: the text to insert."
    if inserted in properties:
        text = f"{properties[inserted]['description']} {text}"
    return properties | {inserted: _with(TEXT, text)}


def computer(date: str, path: str, tool: Json) -> Definition:
    width, height = (needed(path, tool, f"display_{side}_px") for side in ("width", "height"))
    actions = [*ACTIONS, *(LATER_ACTIONS if date >= MORE_ACTIONS else ())]
    if tool.get("enable_zoom"):
        actions.append("zoom")
    return _computer(f"Its screen has {width} x {height} pixels.", actions)


def computer_toolset(_date: str, _path: str, tool: Json) -> Definition:
    return _computer("", _enabled([*ACTIONS, *LATER_ACTIONS, "zoom"], tool))


def _computer(screen: str, actions: list[str]) -> Definition:
    properties = {
        "coordinate": _with(POINT, "[x, y]: where to click, to move, to scroll, or to end a drag."),
        "text": _with(TEXT, "The text to type, or the keys to press, such as ctrl+s; to hold in a click."),
    }
    if "wait" in actions:
        properties |= {
            "start_coordinate": _with(POINT, "[x, y]: where a drag begins."),
            "scroll_direction": SCROLL_DIRECTION,
            "scroll_amount": _with(INTEGER, "Clicks of the wheel."),
            "duration": _with(NUMBER, "Seconds to wait, or to hold a key."),
        }
    if "zoom" in actions:
        properties["region"] = _with(BOX, "`zoom`: [x0, y0, x1, y1].")
    text = "Controls mouse and keyboard of a computer. Coordinates are pixels from the top left corner."
    return Definition(f"{text} {screen}".strip(), _object("action", action=_choice(actions), **properties))


def browser_toolset(_date: str, _path: str, tool: Json) -> Definition:
    target = _object("type", type=_choice(["ref", "coordinate"]), ref=TEXT, x=INTEGER, y=INTEGER)
    return Definition(
        "Controls a web browser. `read_page` and `find` return the elements of the page with references, "
        "which other actions take as their target.",
        _object(
            "action",
            action=_choice(_enabled(BROWSER_ACTIONS, tool)),
            url=_with(TEXT, "`navigate`: the address, or back, forward, reload."),
            tab_id=_with(TEXT, "The tab, if it is not the active one."),
            query=_with(TEXT, "`find`: the element in words."),
            target=_with(target, "The element (`ref`), or a point in pixels (`x`, `y`)."),
            text=_with(TEXT, "The text to type, the keys to press, or the JavaScript to run."),
            value=_with(TEXT, "`form_input`: the new value."),
            paths=_with(TEXTS, "`file_upload`: the files."),
            ref=_with(TEXT, "`read_page`: the element to begin at."),
            depth=_with(INTEGER, "`read_page`: the levels to read."),
            filter=_with(_choice(["all", "interactive"]), "`read_page`: which elements."),
            modifiers=_with(TEXT, "Keys to hold in a click, such as ctrl+shift."),
            scroll_direction=SCROLL_DIRECTION,
            scroll_amount=_with(INTEGER, "Clicks of the wheel."),
            repeat=_with(INTEGER, "`key`: how often."),
            duration=_with(NUMBER, "Seconds to wait, or to hold a key."),
            region=_with(BOX, "`zoom`: [x0, y0, x1, y1]."),
        ),
    )


def _enabled(members: Sequence[str], tool: Json) -> list[str]:
    """The members of a toolset that the request does not turn off."""
    given = tool.get("configs")
    configs = given if isinstance(given, dict) else {}
    off = {
        name
        for name, config in configs.items()
        if isinstance(config, dict) and config.get("enabled") is False
    }
    return [name for name in members if name not in off]


# OpenAI's, each by the tool of the request.


def shell(_tool: Json) -> Definition:
    return Definition(
        "Runs shell commands on the user's machine, and returns the output of each.",
        _object(
            "commands",
            commands=_with(TEXTS, "Commands, each of which runs by itself."),
            timeout_ms=_with(INTEGER, "Milliseconds after which they are ended."),
            max_output_length=_with(INTEGER, "Characters of output to return."),
        ),
    )


def local_shell(_tool: Json) -> Definition:
    return Definition(
        "Runs a command on the user's machine, and returns its output.",
        _object(
            "command",
            command=_with(TEXTS, 'The program and its arguments, such as ["bash", "-lc", "ls | wc -l"].'),
            working_directory=_with(TEXT, "The folder to run it in."),
            env=_with({"type": "object", "additionalProperties": TEXT}, "Environment variables."),
            timeout_ms=_with(INTEGER, "Milliseconds after which it is ended."),
        ),
    )


def apply_patch(_tool: Json) -> Definition:
    return Definition(
        "Creates, changes or deletes one file.",
        _object(
            "type path",
            type=_choice(["create_file", "update_file", "delete_file"]),
            path=_with(TEXT, "The file."),
            diff=_with(
                TEXT,
                "`create_file`: each line of the new file after a `+`. `update_file`: for each change a line "
                "`@@`, then the lines around it after a space, those that go after a `-`, and new ones after "
                "a `+`. `delete_file` has none.",
            ),
        ),
    )


def tool_search(tool: Json) -> Definition:
    parameters = tool.get("parameters")
    if not isinstance(parameters, dict):
        parameters = _object("query", query=_with(TEXT, "Words for what the tool should do."))
    description = tool.get("description")
    return Definition(description or "Finds more tools, which may be called afterwards.", parameters)


_COMPUTER_ACTION = _object(
    "type",
    type=_choice(
        ["click", "double_click", "drag", "keypress", "move", "screenshot", "scroll", "type", "wait"]
    ),
    x=_with(INTEGER, "Pixels from the left."),
    y=_with(INTEGER, "Pixels from the top."),
    button=_choice(["left", "right", "wheel", "back", "forward"]),
    keys=_with(TEXTS, "`keypress`: the keys; else those to hold."),
    text=_with(TEXT, "`type`: the text."),
    path=_with({"type": "array", "items": _object("x y", x=INTEGER, y=INTEGER)}, "`drag`: its points."),
    scroll_x=_with(INTEGER, "`scroll`: pixels to the right."),
    scroll_y=_with(INTEGER, "`scroll`: pixels down."),
)


def computer_use_preview(tool: Json) -> Definition:
    size = f"{tool.get('display_width')} x {tool.get('display_height')} pixels"
    environment = tool.get("environment", "computer")
    return Definition(
        f"Does one action with mouse or keyboard ({environment}, screen of {size}).", _COMPUTER_ACTION
    )


def computer_actions(_tool: Json) -> Definition:
    actions = {"type": "array", "items": _COMPUTER_ACTION}
    return Definition(
        "Does actions with mouse and keyboard of a computer.", _object("actions", actions=actions)
    )
