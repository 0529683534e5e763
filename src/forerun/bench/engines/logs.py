"""Why a program ended, from its log. Knows how programs write their errors; no engine by name.

The reason is seldom the last line: of several processes the one that fails first is followed by others that fail because of it,
and a traceback may be followed by pages of shutting down. Nor is it any line with the word error in it, for warnings have that,
too. Looked for are, in this order: the exception of the last traceback that is not about another failure, what programs
without exceptions say when they give up, lines of the level ERROR, and at last the exceptions about other failures.
"""

from __future__ import annotations

import re
import signal

LONGEST = 600  # characters of a reason
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# what a logger writes in front of a message: process, level, time, place, in any order
_PREFIX = re.compile(
    r"^(?:\s*(?:\([^()]*pid=\d+[^()]*\)|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]*Z?\]?|"
    r"\[?\d\d-\d\d(?: \d\d:\d\d:\d\d[\d.,]*)?\]?(?=\s)|"
    r"\[?\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\]?|\[[\w./-]+\.py:\d+\]|[\w./-]+\.py:\d+:?|\[?(?:ERROR|CRITICAL|FATAL|E)\]?:?(?=\s)|"
    r"\[(?:rank|TP|PP|DP|EP)?\d*(?:[ ,](?:rank|TP|PP|DP|EP)?\d+)*\]|\[TRT-LLM\]|\[[a-z]+\d*\]:|-(?=\s)))+\s?"
)
_QUIET = re.compile(r"\b(?:WARNING|WARN|INFO|DEBUG|TRACE)\b|\[[WID]\]|\b\w*Warning:", re.ASCII)
_LOUD = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|\[[EF]\]")
_HEAD = 70  # characters within which a line names its level
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Failure|Interrupt|Timeout|NotFound)\w*(?::\s|$)")
_LINKS = {
    "The above exception was the direct cause of the following exception:": True,
    "During handling of the above exception, another exception occurred:": False,
}
"""Between the exceptions of one traceback, and whether the one above is the reason of the one below."""

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
    """The reason that a log gives for the end of its program, at most LONGEST characters; None if it gives none."""
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
    """How a process ended, by its exit code. A negative one, or one above 128 of a shell, is a signal."""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"ended with code {code}"
    means = {"SIGKILL": " (often: no memory was left)", "SIGILL": " (the processor lacks an instruction that it uses)"}
    return f"was ended by {name}{means.get(name, '')}"


class _Line:
    """A line without what its logger put in front. quiet: it is a warning or less; loud: of the level ERROR or above."""

    def __init__(self, line: str) -> None:
        head = line[:_HEAD]
        self.loud = _LOUD.search(head) is not None
        self.quiet = not self.loud and _QUIET.search(head) is not None
        self.text = _PREFIX.sub("", line).rstrip()


def _exceptions(lines: list[_Line]) -> list[int]:
    """Where the exceptions stand that end a program or that are logged as errors. Of those linked as cause and effect the
    cause alone."""
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
    """The line, and the next one where the first only announces it."""
    said = lines[at].text.strip()
    rest = next((line.text.strip() for line in lines[at + 1 : at + 3] if line.text.strip()), "")
    if rest and (said.endswith(":") or "validation error" in said):
        said = f"{said} {rest}"
    return said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"
