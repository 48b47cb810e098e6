# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Shows a cache's state while text streams: two live lines below it on a terminal, else a line per change of width."""

from __future__ import annotations

import os
import re
import shutil
import time
import unicodedata
from typing import TextIO

from .report import Snapshot, cells


class StatusLines:
    """A context manager that prints one line each time a width changes.

    Args:
        stream: where to.
        text: where the text goes meanwhile.
    """

    def __init__(self, stream: TextIO, text: TextIO):
        self.stream, self.text = stream, text
        self._bits: tuple[int, ...] | None = None

    def __enter__(self) -> StatusLines:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, snapshot: Snapshot) -> None:
        """Print, if there is something new."""
        if snapshot.bits != self._bits:
            self._bits = snapshot.bits
            tokens, *facts = snapshot.facts()
            print(f"[{tokens}] {snapshot.widths()}; {'; '.join(facts)}", file=self.stream, flush=True)

    def wrap(self, text: str) -> str:
        """The next piece of text as it has to be printed."""
        return text


class LiveStatus(StatusLines):
    """Two lines at the bottom of a terminal; the text scrolls above them.

    The terminal itself keeps both apart (a scroll region), so it does not matter where the text has come to.
    """

    rows = 2
    #: Least time between two drawings, unless a width changes.
    seconds = 0.1

    def __init__(self, stream: TextIO, text: TextIO):
        super().__init__(stream, text)
        self._size: os.terminal_size | None = None
        self._drawn = 0.0
        self._column = 0

    def __exit__(self, *exception: object) -> None:
        if self._size is not None:
            # Setting the region moves the cursor, hence save (7) and restore (8); then erase what is below the text.
            self._write("\0337\033[r\0338\033[J")

    def show(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        if snapshot.bits == self._bits and now - self._drawn < self.seconds:
            return
        self._bits, self._drawn = snapshot.bits, now
        size = shutil.get_terminal_size()
        if size != self._size:
            self._size = size
            self._reserve()
        drawn = enumerate(self._lines(snapshot, size.columns - 1), size.lines - self.rows + 1)
        self._write("\0337" + "".join(f"\033[{row};1H\033[2K{line}" for row, line in drawn) + "\0338")

    def wrap(self, text: str) -> str:
        """Break lines between words, one column early.

        Terminals forget that a line is full when they save the cursor there; the next character would overwrite the
        last one.
        """
        if not self.text.isatty():
            return text
        limit = shutil.get_terminal_size().columns - 1
        out = []
        for part in re.findall(r"\n|[^\S\n]+|\S+", text.expandtabs(4)):
            width = _columns(part)
            if self._column + width > limit and part != "\n":
                if part.isspace():
                    self._column = limit
                    continue
                out.append("\n" if self._column else "")
                self._column = 0
            for character in part:
                if self._column + _columns(character) > limit:
                    out.append("\n")
                    self._column = 0
                out.append(character)
                self._column = 0 if character == "\n" else self._column + _columns(character)
        return "".join(out)

    def _reserve(self) -> None:
        """Keep the last rows free. Going down first (D) scrolls the text up if it has come that far."""
        down, up = "\033D" * self.rows, f"\033[{self.rows}A"
        self._write(f"\033[J{down}\0337\033[1;{self._size.lines - self.rows}r\0338{up}")

    def _lines(self, snapshot: Snapshot, columns: int) -> tuple[str, str]:
        """The widths and the rest, each cut to what fits."""
        widths = snapshot.widths()[:columns]
        if len(snapshot.bits) + 2 + len(widths) <= columns:
            widths = f"{cells(snapshot.bits, self.stream.encoding, 'NO_COLOR' not in os.environ)}  {widths}"
        facts = snapshot.facts()
        while len(facts) > 1 and len(" | ".join(facts)) > columns:
            facts.pop()
        return widths, " | ".join(facts)[:columns]

    def _write(self, codes: str) -> None:
        # The text must be out before the cursor's place is saved.
        self.text.flush()
        self.stream.write(codes)
        self.stream.flush()


def status_display(stream: TextIO, text: TextIO) -> StatusLines:
    """The right display on `stream`, while text goes to `text`: live if it is a terminal that can do it."""
    capable = stream.isatty() and os.name == "posix" and os.environ.get("TERM", "dumb") != "dumb"
    # In fewer lines there would be no room for text.
    capable = capable and shutil.get_terminal_size().lines > 2 * LiveStatus.rows
    return (LiveStatus if capable else StatusLines)(stream, text)


def _columns(text: str) -> int:
    """Columns that `text` takes on a terminal."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)
