"""JSON as models write it, made valid while it grows."""

from __future__ import annotations

CLOSING = {"{": "}", "[": "]"}
# What JSON has outside of strings, apart from brackets and commas.
WORDS = frozenset(":+-.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
CONTROL = {chr(code): f"\\u{code:04x}" for code in range(32)} | {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class JsonMender:
    """Reads one JSON object, or the rest of one whose brackets `opened` are open, the innermost last.

    Control characters in strings are escaped, a comma before a closing bracket is left out, and `close`
    closes the brackets that are open. Other mistakes stay.
    """

    def __init__(self, opened: str):
        self._closing = [CLOSING[bracket] for bracket in opened]
        self._in_string = False
        self._is_escaped = False
        self._comma = ""  # which a closing bracket may follow, and the spaces after it
        self.is_complete = False
        self.is_stopped = False  # by a character that JSON does not have there

    @property
    def may_close(self) -> bool:
        """Whether only closing brackets are missing."""
        return not self._in_string

    def push(self, text: str) -> tuple[str, int]:
        """The mended JSON that `text` adds, and how many of its characters belong to the object."""
        mended = ""
        for at, character in enumerate(text):
            if self._in_string:
                mended += self._in_text(character)
            elif character.isspace() and self._comma:
                self._comma += character
            elif character == ",":
                mended += self._comma
                self._comma = character
            elif character in "}]":
                if not self._closing or character != self._closing[-1]:
                    self.is_stopped = True
                    return mended, at
                self._closing.pop()
                self._comma = ""
                mended += character
                if not self._closing:
                    self.is_complete = True
                    return mended, at + 1
            elif character in '{["' or character in WORDS or character.isspace():
                mended += self._comma + character
                self._comma = ""
                self._in_string = character == '"'
                if character in CLOSING:
                    self._closing.append(CLOSING[character])
            else:
                self.is_stopped = True
                return mended, at
        return mended, len(text)

    def _in_text(self, character: str) -> str:
        """The next character of a string, or the quote after it."""
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False
        return CONTROL.get(character, character)

    def close(self) -> str:
        """The brackets that are missing."""
        self.is_complete = True
        return "".join(reversed(self._closing))
