"""The reason for which a program ended, from its log. Knows the forms in which programs write errors, and no engine by name.

The reason is seldom the last line. When one of several processes fails, the others log failures that follow from it, and a
traceback may be followed by many lines about shutting down. A line with the word error may be a warning. The reason is looked
for in this order: the exception of the last traceback that is not about another failure, the final messages of programs
without exceptions, lines of the level ERROR, and the exceptions about other failures.
"""

from __future__ import annotations

import re
import signal

LONGEST = 600  # characters of a reason
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# what loggers write before a message: process, level, time and place, in any order
_PREFIX = re.compile(
    r"^(?:\s*(?:\([^()]*pid=\d+[^()]*\)|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]*Z?\]?|"
    r"\[?\d\d-\d\d(?: \d\d:\d\d:\d\d[\d.,]*)?\]?(?=\s)|"
    r"\[?\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\]?|\[[\w./-]+\.py:\d+\]|[\w./-]+\.py:\d+:?|\[?(?:ERROR|CRITICAL|FATAL|E)\]?:?(?=\s)|"
    r"\[(?:rank|TP|PP|DP|EP)?\d*(?:[ ,](?:rank|TP|PP|DP|EP)?\d+)*\]|\[TRT-LLM\]|\[[a-z]+\d*\]:|-(?=\s)))+\s?"
)
_QUIET = re.compile(r"\b(?:WARNING|WARN|INFO|DEBUG|TRACE)\b|\[[WID]\]|\b\w*Warning:", re.ASCII)
_LOUD = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|\[[EF]\]")
_HEAD = 70  # characters at the start of a line that may hold its level
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Failure|Interrupt|Timeout|NotFound)\w*(?::\s|$)")
_LINKS = {
    "The above exception was the direct cause of the following exception:": True,
    "During handling of the above exception, another exception occurred:": False,
}
"""The lines between two exceptions of a traceback, and whether the upper exception is the cause of the lower one."""

_OF_ANOTHER = re.compile(
    r"root cause|see (?:stack trace )?above|[Ee]ngine core initialization failed|[Ee]ngine process failed"
    r"|[Pp]rocesses? (?:failed|died|exited)|[Cc]hild ?(?:process|Failed)|ProcessExited|SystemExit|KeyboardInterrupt"
    r"|CancelledError|BrokenPipeError|EOFError|ConnectionResetError|CalledProcessError|Worker\w* (?:failed|died)"
    r"|returned non-zero exit status|EngineDeadError"
)
_GIVES_UP = re.compile(
    r"error while loading shared libraries:|^\S*:? ?(?:fatal )?error: |: error: |\bCUDA (?:error|out of memory)"
    r"|\bout of memory\b|[Aa]ddress already in use|couldn't bind|cannot bind|failed to bind|error loading model"
    r"|[Ff]ailed to (?:load|open|read|allocate|start|initiali[sz]e|create)|unable to (?:load|open|allocate)"
    r"|GGML_ASSERT|Assertion .* failed|what\(\):|command not found|No such file or directory|Permission denied"
    r"|unrecognized arguments|invalid argument|unknown argument|[Ii]llegal instruction|Segmentation fault|core dumped"
    r"|^Killed$|panicked at|cannot open shared object"
)
_HARMLESS = re.compile(
    r"ggml_\w+_init: failed|load_backend: failed|no usable GPU|will fall back|falling back|ignor(?:ed|ing)|retrying"
)


def reason(log: str) -> str | None:
    """The reason in at most LONGEST characters; None if the log has none."""
    lines = [_Line(line) for line in COLOUR.sub("", log).splitlines()]
    ends = _exceptions(lines)
    own = [at for at in ends if not _OF_ANOTHER.search(lines[at].text)]
    if own:
        return _whole(lines, own[-1])
    speaking = [at for at, line in enumerate(lines) if not line.quiet and not _HARMLESS.search(line.text)]
    for wanted in (_GIVES_UP, None):
        found = [at for at in speaking if (lines[at].loud if wanted is None else wanted.search(lines[at].text))]
        if found:
            return _whole(lines, next((at for at in found if not _OF_ANOTHER.search(lines[at].text)), found[0]))
    return _whole(lines, ends[-1]) if ends else None


def ended(code: int) -> str:
    """An exit code in words. A negative code, or a shell's code above 128, is a signal."""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"ended with code {code}"
    means = {"SIGKILL": " (often: no memory was left)", "SIGILL": " (the processor lacks an instruction that it uses)"}
    return f"was ended by {name}{means.get(name, '')}"


class _Line:
    """A line without its logger's prefix. quiet: of the level WARNING or below. loud: of the level ERROR or above."""

    def __init__(self, line: str) -> None:
        head = line[:_HEAD]
        self.loud = _LOUD.search(head) is not None
        self.quiet = not self.loud and _QUIET.search(head) is not None
        self.text = _PREFIX.sub("", line).rstrip()


def _exceptions(lines: list[_Line]) -> list[int]:
    """The indices of the lines with exceptions that ended a program or were logged as errors. Of a cause and its effect only
    the cause is given."""
    found: list[int] = []
    linked: bool | None = None
    for at, line in enumerate(lines):
        if line.text in _LINKS:
            linked = _LINKS[line.text]
        elif not line.quiet and _EXCEPTION.match(line.text):
            if linked is None or not found:
                found.append(at)
            elif not linked:
                found[-1] = at
            linked = None
    return found


def _whole(lines: list[_Line], at: int) -> str:
    """The line, with the next one if the line only introduces it."""
    said = lines[at].text.strip()
    rest = next((line.text.strip() for line in lines[at + 1 : at + 3] if line.text.strip()), "")
    if rest and (said.endswith(":") or "validation error" in said):
        said = f"{said} {rest}"
    return said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"
