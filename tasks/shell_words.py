"""Words of a shell script: quotes, comments, here documents and continuation lines, nothing expanded or run.

`commands(text)` gives the simple commands in order; "(" and ")" stay words of their own, so that functions and arrays
can be told. A word remembers which of its pieces were protected from expansion.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

OPERATORS = ("&&", "||", ";;", "|&", "|", ";", "&", "(", ")", "\n")
_HEREDOC = re.compile(r"[0-9]*<<(-?)\s*(['\"]?)([A-Za-z_]\w*)\2")


@dataclass(slots=True)
class Word:
    """One word before expansion: pieces of literal text (True) and of text in which variables count (False)."""

    pieces: list[tuple[bool, str]] = field(default_factory=list)

    def plain(self) -> str:
        """Return the text without expansion."""
        return "".join(text for _, text in self.pieces)


Command = list[Word]


def commands(text: str) -> list[Command]:
    """Return the simple commands of a script; raise ValueError with the line of a quote that is never closed."""
    return _Lexer(text).commands()


class _Lexer:
    """Splits a script into simple commands of words."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text.replace("\\\n", ""), 0
        self.awaited: list[tuple[str, bool]] = []  # here documents that begin after this line

    def commands(self) -> list[Command]:
        """Return all commands; the words "(" and ")" of arrays and functions are words of their own."""
        found: list[Command] = [[]]
        word: Word | None = None
        text, in_array = self.text, False
        while self.at < len(text):
            char = text[self.at]
            if char in " \t\r" or (in_array and char == "\n"):
                word, self.at = None, self.at + 1
            elif char == "#" and word is None:
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif word is None and (match := _HEREDOC.match(text, self.at)):
                self.awaited.append((match[3], match[1] == "-"))
                self.at = match.end()
            elif operator := next((o for o in OPERATORS if text.startswith(o, self.at)), None):
                in_array = operator == "(" and word is not None and word.plain().endswith("=")
                word = None
                self.at += len(operator)
                if operator in "()":
                    found[-1].append(Word([(True, operator)]))
                    continue
                found.append([])
                if operator == "\n":
                    self.skip_documents()
            else:
                if word is None:
                    word = Word()
                    found[-1].append(word)
                word.pieces.append(self.piece(char))
        return [command for command in found if command]

    def piece(self, char: str) -> tuple[bool, str]:
        """Read one quoted or unquoted piece of a word."""
        text, start = self.text, self.at
        if char == "'":
            end = text.find("'", start + 1)
            if end < 0:
                raise ValueError(f"line {text.count(chr(10), 0, start) + 1}: a ' is never closed")
            self.at = end + 1
            return True, text[start + 1 : end]
        if char == '"':
            return False, self.double_quoted()
        if char == "\\":
            self.at += 2
            return True, text[start + 1 : start + 2]
        if text.startswith(("$(", "${", "`"), start):
            self.at = self.balanced(start)
            return False, text[start : self.at]
        self.at += 1
        while self.at < len(text) and text[self.at] not in " \t\r\n'\"\\`;&|()$":
            self.at += 1
        return False, text[start : self.at]

    def double_quoted(self) -> str:
        """Read to the closing quote; a backslash hides quote, backslash, dollar and back tick, and stays otherwise."""
        text, start = self.text, self.at
        out: list[str] = []
        self.at += 1
        while self.at < len(text):
            char = text[self.at]
            if char == '"':
                self.at += 1
                return "".join(out)
            if char == "\\" and text[self.at + 1 : self.at + 2] in set('"\\$`'):
                out.append(("\0" if text[self.at + 1] == "$" else "") + text[self.at + 1])
                self.at += 2
            elif text.startswith(("$(", "${", "`"), self.at):
                end = self.balanced(self.at)
                out.append(text[self.at : end])
                self.at = end
            else:
                out.append(char)
                self.at += 1
        raise ValueError(f'line {text.count(chr(10), 0, start) + 1}: a " is never closed')

    def balanced(self, start: int) -> int:
        """Return where a `$(...)`, `${...}` or back-ticked text ends; quotes inside are skipped as a whole."""
        text = self.text
        if text[start] == "`":
            end = text.find("`", start + 1)
            return len(text) if end < 0 else end + 1
        opening, closing = text[start + 1], ")" if text[start + 1] == "(" else "}"
        depth, at = 0, start + 1
        while at < len(text):
            char = text[at]
            if char == "\\":
                at += 1
            elif char in "'\"" and opening == "(":
                end = text.find(char, at + 1)
                at = len(text) if end < 0 else end
            elif char in (opening, closing):
                depth += 1 if char == opening else -1
                if not depth:
                    return at + 1
            at += 1
        return len(text)

    def skip_documents(self) -> None:
        """Step over the here documents that the line before announced."""
        for delimiter, tabs in self.awaited:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = end + 1
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
        self.awaited.clear()
