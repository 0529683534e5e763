"""Options of bench: the printed command repeats the same run, secrets are written nowhere, and bad options are refused before
anything is measured."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from forerun import cli
from forerun.bench import command, options
from forerun.bench.engines import addresses
from forerun.bench.engines.dialects import DIALECTS
from forerun.bench.engines.openai import Address
from forerun.bench.options import DEFAULTS, OPTIONS, Options
from forerun.bench.pages import words
from forerun.bench.records import record, redaction
from forerun.types import SettingError
from tests.mock_server import MockServer, Script, paced
from tests.records import Way, fake
from tests.test_servers import MOCK
from tests.tiny import tiny_model


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    redaction.forget()
    yield
    redaction.forget()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("options") / "tiny", positions=2048))


def bench(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(cli.app, ["bench", *arguments])


def parsed(line: list[str], monkeypatch: pytest.MonkeyPatch) -> Options:
    """The options that the command line parses from these words."""
    found: list[Options] = []
    monkeypatch.setattr("forerun.cli.bench.execute", lambda asked, *_: found.append(asked))
    assert line[:2] == ["forerun", "bench"]
    shown = CliRunner().invoke(cli.app, line[1:])
    assert shown.exit_code == 0, shown.output
    return found[0]


# the command that repeats a run


def some(draw: random.Random, folder: Path) -> Options:
    """Random options that go together."""

    def maybe(**values: Any) -> dict[str, Any]:
        return {name: draw.choice(value) for name, value in values.items() if draw.random() < 0.5}

    ngram = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}'
    suffix = '{"method": "suffix", "suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_min_token_prob": 0.25}'
    given: dict[str, Any] = maybe(
        model=["owner/name", "a b/model.gguf", "-odd", "späte größe"],
        tasks=[("copy",), ("chat-zh", "random", "explain")],
        requests=[3, 64],
        repetitions=[1, 17],
        warmups=[0, 2],
        max_tokens=[2, 200],
        control=[True],
        samples=[50],
        seed=[7, -3],
        concurrency=[(4,), (1, 8, 32)],
    )
    if draw.random() < 0.3:
        given["rates"] = draw.choice([(0.1,), (2.5, 1e-3)])
        given["concurrency"] = draw.choice([(), (2,)])
    if draw.random() < 0.3:
        given |= {"prompts": (folder / "my prompts.jsonl", folder / "b.jsonl"), "tasks": draw.choice([(), ("copy",)])}
    engine = draw.choice(["forerun", "vllm", "http://127.0.0.1:8000/v1"])
    if engine == "forerun":
        given |= maybe(arms=[("suffix",), ("ngram:k=2,4",), (ngram, suffix)], slots=[1, 9])
        given |= maybe(dtype=["float32", "bfloat16"], quantization=["int8", "int4"], device=["cpu"])
    elif engine == "vllm":
        flags = "flags:--spec-type 'a b' --x=\"1 2\""
        given |= maybe(arms=[("ngram",), (suffix, flags)], slots=[3], template=[folder / "t.toml"], logs=[folder])
        given |= maybe(server_args=["--enforce-eager", "--a 'b c' --d"], context=[512], alive=["together", "in-turns"])
        given |= maybe(program=["/x y/vllm", "-m"])
    else:
        given["arms"] = draw.choice([("prediction",), ("a=http://h:1", "b b=https://h/v1")])
        given |= maybe(served_model=["m m"], api_key_env=["KEY"])
    if engine != "forerun":
        given |= maybe(body=['{"top_k": 5}', '{"a": "it\'s \\"x\\""}'], timeout_s=[3.5], idle_timeout_s=[1e-3], tokenizer=["t"])
    return Options(engine=engine, **given)


def test_the_printed_command_gives_the_same_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, seen = random.Random(0), set()
    for _ in range(60):
        asked = some(draw, tmp_path)
        asked.check()
        again = parsed(shlex.split(shlex.join(options.words(asked))), monkeypatch)
        assert again == asked
        assert options.read(json.loads(json.dumps(options.asked(asked)))) == asked, "and so does the record"
        seen |= {name for name in OPTIONS if getattr(asked, name) != getattr(DEFAULTS, name)}
    assert seen >= set(OPTIONS) - {"trace", "trace_speed", "headers", "connect_timeout_s"}
    trace = Options(trace=tmp_path / "log.jsonl", trace_speed=2.5, concurrency=(), requests=4)
    assert parsed(options.words(trace), monkeypatch) == trace


def test_every_option_has_its_flag() -> None:
    flags = [flag for known in OPTIONS.values() for flag in known.flags]
    assert set(OPTIONS) == {field.name for field in dataclasses.fields(Options)} and len(set(flags)) == len(flags)
    taken = {param.name: param.opts for param in get_command(cli.app).commands["bench"].params}
    assert {name: list(known.flags) for name, known in OPTIONS.items()}.items() <= taken.items()


def test_the_command_of_a_record_repeats_its_plan(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names dtype, device and the drafters' own settings even where the user left them at their defaults."""
    arm = '{"method": "suffix", "suffix_decoding_max_spec_factor": 2.0}'
    asked = ("--tasks", "copy", "-a", arm, "-a", "ngram", "-r", "1", "-n", "4")
    shown = bench("-m", model, *asked, "-o", str(tmp_path / "r.json"))
    assert shown.exit_code == 0, shown.output
    made = record.load(tmp_path / "r.json")
    line = shlex.split(words.command(made))
    assert "--dtype float32 --device cpu" in shlex.join(line)
    with monkeypatch.context() as patched:
        again = parsed(line, patched)
    plan = command.plan_of(again)
    assert (plan.tasks, plan.repetitions, plan.max_tokens) == (command.plan_of(Options(tasks=("copy",))).tasks, 1, 4)
    subject = command.subject_of(again, plan)
    assert [side.arm.settings for side in subject.sides] == [arm.speculation for arm in made.settings.arms]
    assert bench(*line[2:], "-o", str(tmp_path / "s.json")).exit_code == 0
    one, two = (record.load(tmp_path / name).settings for name in ("r.json", "s.json"))
    assert [a.speculation for a in one.arms] == [a.speculation for a in two.arms]
    assert one.contents == two.contents and one.command == two.command


def test_default_arms_are_written_out(model: str) -> None:
    asked = Options(model=model, tasks=("copy",), repetitions=2)
    plan = command.plan_of(asked)
    line = command.described(command.subject_of(asked, plan), asked, plan).origin.command
    assert shlex.join(line).startswith(f"forerun bench -m {model} -a ngram -a suffix --tasks copy -c 1 -r 2 --warmups 1 -n 128")


OLD = ("demo-cpu-2026-11-29", "cpu-eight-requests-2026-11-29", "cpu-explain-eight", "forerun-cpu", "llamacpp-cpu", "vllm-cpu")


@pytest.mark.parametrize("name", OLD)
def test_records_of_older_versions_give_a_command_that_can_be_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = record.load(Path(__file__).parents[1] / "benchmarks/results" / f"{name}.json.gz")
    line = shlex.split(words.command(made))
    asked = parsed(line, monkeypatch)
    plan = command.plan_of(asked)
    assert (plan.repetitions, plan.max_tokens) == (made.settings.repetitions, made.settings.max_tokens)
    assert [t.name for t in plan.tasks] == list(made.settings.tasks)
    if asked.engine == "forerun":
        from forerun.bench.engines.arms import parse

        given = [arm.settings for arm in parse(asked.arms)]
        assert given == [a.speculation for a in made.settings.arms if a.speculation is not None]


def test_a_made_up_record_gives_its_drafters_settings() -> None:
    line = shlex.split(words.command(fake({"baseline": way(), "x": way(4)})))
    (arm,) = [line[i + 1] for i, word in enumerate(line) if word == "-a"]
    assert json.loads(arm)["prompt_lookup_max"] == 5 and "--dtype" in line


def way(drafted: int = 0) -> Way:
    return Way(10.0, drafted, (0,))


# secrets

S = "Zq7plantedSecret42"


@contextmanager
def served(*servers: MockServer) -> Iterator[list[str]]:
    """Mock servers in a thread of their own."""
    ready, stop, urls = threading.Event(), threading.Event(), []

    async def go() -> None:
        for server in servers:
            await server.__aenter__()
            urls.append(server.url)
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.01)
        for server in servers:
            await server.__aexit__()

    thread = threading.Thread(target=lambda: asyncio.run(go()))
    thread.start()
    assert ready.wait(10)
    try:
        yield urls
    finally:
        stop.set()
        thread.join()


def answers(body: dict[str, Any]) -> Script:
    return Script(paced(0.0005, body["max_tokens"], 1))


def refuses(body: dict[str, Any]) -> Script:
    said = json.dumps({"error": {"message": f"Incorrect API key provided: {S}. See {S[:6]}"}}).encode()
    return Script(raw=(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: %d\r\n\r\n" % len(said) + said,))


def everything(folder: Path, *shown: Any) -> str:
    """Everything that was written to the screen and to files."""
    texts = [one.output + one.stderr for one in shown]
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in ("start.py", "mock.toml"):
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(texts)


def outputs(folder: Path) -> list[str]:
    return ["-o", str(folder / "r.json"), "--markdown", str(folder / "r.md"), "--html", str(folder / "r.html"),
            "--ci", "failures == 0", "--junit", str(folder / "r.xml")]  # fmt: skip


def test_secrets_for_running_servers_are_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every option that can hold one, with servers that answer, and with one that repeats the key that it refuses."""
    monkeypatch.setenv("PLANTED", S)
    for which in (answers, refuses):
        folder = tmp_path / which.__name__
        folder.mkdir()
        with served(MockServer(answers), MockServer(which)) as (one, two):
            with_key = [url.replace("http://", f"http://me:{S}@") for url in (one, two)]
            asked = ["-e", with_key[0], "-a", f"fast={with_key[1]}", "--tasks", "explain", "-r", "2", "-n", "8"]
            secrets = ["--header", f"X-Api-Key: {S}", f"--header=Authorization: Bearer {S}", "--header", f"X-Odd: {S}"]
            secrets += ["--body", json.dumps({"api_key": S, "metadata": {"token": S}}), "--api-key-env", "PLANTED"]
            shown = bench(*asked, *secrets, *outputs(folder))
            assert shown.exit_code in (0, 1, 3), shown.output
            assert record.load(folder / "r.json").batches
            again = bench("--resume", str(folder / "r.json"))
            assert again.exit_code == 2 and "give these options again" in again.output
            repeated = bench("--resume", str(folder / "r.json"), *asked, *secrets)
            assert repeated.exit_code in (0, 3), repeated.output
        written = everything(folder, shown, again, repeated)
        assert S not in written and "***" in written and "X-Odd: ***" in written
        shown = CliRunner().invoke(cli.app, ["report", str(folder / "r.json"), "--html", str(folder / "again.html")])
        assert S not in everything(folder, shown)


START = """
import json, sys
print("non-default args:", {{"api_key": sys.argv[1:], "argv": " ".join(sys.argv)}}, flush=True)
print("WARNING key={secret} is used", flush=True)
at = sys.argv.index("--port")
sys.argv = sys.argv[:1] + sys.argv[at:at + 2]
from tests import mock_server
{rest}
"""


@pytest.mark.parametrize("comes_up", [True, False])
def test_secrets_of_servers_that_are_started_are_written_nowhere(tmp_path: Path, comes_up: bool) -> None:
    """The secrets are on the servers' command lines, in the template and in the logs, also if one does not come up."""
    rest = "mock_server.main()" if comes_up else f"raise ValueError('--api-key {S} is refused')"
    (tmp_path / "start.py").write_text(START.format(rest=rest, secret=S))
    (tmp_path / "logs").mkdir()
    first = f'command = ["python", "{tmp_path / "start.py"}", "--hf-token", "{S}"'
    begin = MOCK.index("command = ["), MOCK.index(', "--port"')
    text = MOCK[: begin[0]] + first + MOCK[begin[1] :].replace("['never said']", "['is used']", 1)
    (tmp_path / "mock.toml").write_text(text)
    given = ["-e", "vllm", "--template", str(tmp_path / "mock.toml"), "--program", sys.executable, "-m", "some/model"]
    given += ["--tasks", "explain", "-r", "2", "-n", "6", "--alive", "together", "--logs", str(tmp_path / "logs")]
    secrets = ["--server-args", f"--api-key {S} second{S} --other 1", "-a", f"flags:--ssl-key-password {S}"]
    secrets += ["-a", json.dumps({"method": "ngram", "num_speculative_tokens": 2, "hf_token": S})]
    shown = bench(*given, *secrets, *outputs(tmp_path))
    assert shown.exit_code == (0 if comes_up else 2), shown.output
    written = everything(tmp_path, shown)
    assert S not in written and "***" in written
    if comes_up:
        made = record.load(tmp_path / "r.json")
        assert made.settings.arms[0].facts is not None and "--api-key" in made.settings.arms[0].facts.command
        assert [a.name for a in made.settings.arms] == ["baseline", "--ssl-key-password ***", "ngram k=2"]
        assert "--other 1" in words.command(made)
    else:
        assert "ValueError: --api-key *** is refused" in shown.output


def test_records_of_older_versions_are_cleaned_as_they_are_read(tmp_path: Path) -> None:
    made = fake({"baseline": way(), "x": way(4)}, command=("forerun", "bench"))
    text = made.to_json().replace('"forerun","bench"', f'"forerun","bench","--header=Authorization: {S}","--hf-token","{S}"', 1)
    assert S in text
    (tmp_path / "old.json").write_text(text)
    shown = CliRunner().invoke(cli.app, ["report", str(tmp_path / "old.json"), "--markdown", str(tmp_path / "old.md")])
    (tmp_path / "old.json").unlink()
    assert shown.exit_code == 0 and S not in everything(tmp_path, shown) and "***" in everything(tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        ["--body", '{"api_key": "' + S],
        ["--body", json.dumps([{"api_key": S}])],
        ["--header", f"Authorization Bearer {S}"],
        ["--header", f"Authorization: a\nX: {S}"],
        ["-e", f"http://u:{S}@127.0.0.1:9", "-a", "b=http://127.0.0.1:9"],
        ["-e", f"http://127.0.0.1:9?api_key={S}", "-a", "b=http://127.0.0.1:9"],
        ["-e", f"http://u:{S}@[::bad", "-a", "b=http://127.0.0.1:9"],
        ["-e", "http://127.0.0.1:9", "-a", f"http://u:{S}@h"],
        ["-e", "vllm", "--server-args", f"--api-key '{S}"],
        ["-e", "vllm", "-m", "m", "-a", json.dumps({"num_speculative_tokens": 3, "token": S})],
        ["-e", "vllm", "-m", "m", "-a", '{"method": "x", "hf_token": "' + S],
        ["--server-args", f"--api-key {S}"],
        ["--header", f"X: {S}"],
        ["--body", json.dumps({"password": S})],
        ["--program", f"/x --token {S}"],
        ["-a", f"--api-key={S}"],
    ],
)
def test_error_messages_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    if "-e" not in given and given[0] in ("--body", "--header") and "X: " not in given[1] and "password" not in given[1]:
        given = ["-e", "http://127.0.0.1:9", "-a", "b=http://127.0.0.1:8", *given]
    shown = bench("--tasks", "explain", *given)
    assert shown.exit_code == 2 and S not in shown.output + shown.stderr and "error: " in shown.stderr


def test_a_secret_that_was_left_out_is_asked_for() -> None:
    for given in ({"headers": ("A: ***",)}, {"arms": ("a=http://***@h",)}, {"engine": "http://***@h"}):
        with pytest.raises(SettingError, match="secret that was left out"):
            Options(**({"engine": "http://h", "arms": ("a=http://g",)} | given)).check()


# before anything is measured


def address(url: str, model: str = "m", **more: Any) -> Address:
    return Address(url, model, DIALECTS["vllm"], **more)


@pytest.mark.parametrize(
    "where", ["127.0.0.1:8000", "127.0.0.1:8000/", "127.0.0.1:8000/v1", "localhost:8000/v1/", "[::1]:8000", "0.0.0.0:8000"]
)
def test_one_server_under_several_names(where: str) -> None:
    one, other = address("http://127.0.0.1:8000"), f"http://{where}"
    assert addresses.same(one, address(other)) and (addresses.on_this_machine(other) or "0.0.0.0" in where)
    assert not addresses.same(one, address(other, "another model"))
    assert not addresses.same(one, address(other, body={"speculative": True}))
    assert addresses.same(address("http://H.example"), address("http://h.example:80/v1"))


@pytest.mark.parametrize("other", ["http://127.0.0.1:8001", "https://127.0.0.1:8000", "http://10.0.0.5:8000", "http://h:8000/a"])
def test_other_servers(other: str) -> None:
    assert not addresses.same(address("http://127.0.0.1:8000"), address(other))


def test_the_same_server_as_both_arms_is_refused(tmp_path: Path) -> None:
    with served(MockServer(answers)) as (url,):
        for arm in (f"fast={url}", f"fast={url}/v1/", f"fast={url.replace('127.0.0.1', 'localhost')}"):
            shown = bench("-e", url, "-a", arm, "--tasks", "explain", "-o", str(tmp_path / "r.json"))
            assert shown.exit_code == 2 and "nothing to compare" in shown.stderr and "--control" in shown.stderr
        fine = bench("-e", url, "-a", "prediction", "--tasks", "explain", "-r", "1", "-n", "4", "-o", str(tmp_path / "r.json"))
        assert fine.exit_code == 0, "a prediction is another request"


def test_a_servers_own_machine_is_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(MockServer(answers), MockServer(answers)) as (one, two):
        asked = ["-e", one, "-a", f"b={two}", "--tasks", "explain", "-r", "1", "-n", "4", "-o", str(tmp_path / "r.json")]
        assert bench(*asked).exit_code == 0 and not record.load(tmp_path / "r.json").machine.client_only
        monkeypatch.setattr(addresses, "on_this_machine", lambda url: False)
        shown = bench(*asked, "--html", str(tmp_path / "r.html"))
    made = record.load(tmp_path / "r.json")
    assert made.machine.client_only and "unknown hardware, asked from" in words.title(made)
    assert any("another machine" in w for w in words.warnings(made))
    assert "Client&#39;s machine" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "unknown hardware" in shown.stdout


@pytest.mark.parametrize("url", ["http://10.1.2.3:8000", "https://api.example.com", "http://127.example.com"])
def test_what_is_elsewhere(url: str) -> None:
    assert not addresses.on_this_machine(url)


def refused(given: list[str], *said: str, before: Callable[[], None] = lambda: None) -> None:
    shown = bench(*given)
    assert shown.exit_code == 2, shown.output
    (error,) = [line for line in shown.stderr.splitlines() if line.startswith("error: ")]
    for word in said:
        assert word in error
    assert "Record: " not in shown.stderr, "nothing was begun"


def test_tasks_that_cannot_be_measured_are_found_out_before_anything_is(tmp_path: Path, model: str) -> None:
    base = tiny_model(tmp_path / "base", positions=2048)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    out = ["-o", str(tmp_path / "r.json"), "-r", "1", "-n", "4"]
    refused(["-m", str(base), "--tasks", "copy,explain", *out], "explain", "chat template")
    short = str(tiny_model(tmp_path / "short", positions=64))
    refused(["-m", short, "--tasks", "copy", *out], "copy", "context has 64")
    with served(MockServer(answers), MockServer(answers, engine="somebody")) as (vllm, other):
        refused(["-e", vllm, "-a", f"b={other}", "--tasks", "explain,random", *out], "random", "--tokenizer")
        refused(["-e", other, "-a", f"b={vllm}", "--tasks", "explain,random", "--tokenizer", model, *out], "no token ids")
    refused(["-e", "vllm", "-m", "owner/name", "--tasks", "random", *out], "random", "--tokenizer")


def test_prompts_of_which_some_do_not_fit_are_noted_and_fail_alone(tmp_path: Path) -> None:
    lines = [{"prompt": "the thing " * (300 if i == 1 else 2)} for i in range(9)]
    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    short, path = str(tiny_model(tmp_path / "short", positions=256)), tmp_path / "r.json"
    asked = ("--tasks", "none", "--prompts", str(tmp_path / "mine.jsonl"), "-r", "3", "-n", "4", "-a", "ngram")
    shown = bench("-m", short, *asked, "-o", str(path))
    made = record.load(path)
    assert shown.exit_code == 0 and any("1 of 4 prompts of mine are too long (mine line 2 has" in n for n in made.notes)
    failed = [a for b in made.batches for a in b.answers if a.failed]
    assert len(failed) == 2 and {a.prompt for a in failed} == {"mine line 2"} and made.finished


@pytest.mark.parametrize(
    "given, said",
    [
        (["--dtype", "float32", "-e", "vllm"], ("dtype", "--server-args")),
        (["--context", "100"], ("context", "--engine vllm")),
        (["--slots", "3", "-e", "http://h"], ("slots",)),
        (["--timeout", "3"], ("timeout", "--engine")),
        (["--tokenizer", "x"], ("tokenizer", "--engine")),
        (["--trace-speed", "3"], ("trace_speed", "--trace")),
        (["--trace", "x", "--tasks", "copy"], ("tasks", "--tasks")),
        (["--trace", "x", "--prompts", "y"], ("prompts",)),
        (["--program", "x"], ("program", "--engine vllm")),
        (["-c", "two"], ("concurrency", "1,8,32")),
        (["--rate", "0"], ("rate", "for instance 2")),
        (["--ci", "speed > 1"], ("ci", "speedup")),
        (["--ci", "speedup.poem > 1"], ("ci", "poem")),
        (["--junit", "x.xml"], ("junit", "--ci")),
        (["--html", "/nowhere/at/all.html"], ("html", "folder")),
        (["--markdown", "/"], ("markdown", "folder")),
        (["-o", "/proc/nothing.json"], ("output",)),
        (["-o", "a.json", "--html", "a.json"], ("html", "another name")),
        (["--markdown", "a.md", "--html", "./b/../a.md"], ("markdown", "another name")),
        (["--resume", "/nowhere/at/all.json"], ("file", "cannot be read")),
        (["--logs", "/nowhere/at/all", "-e", "vllm"], ("logs", "make it first")),
        (["-e", "ollama"], ("engine", "vllm")),
        (["-e", "http://127.0.0.1:9", "-a", "b=http://127.0.0.1:8"], ("engine", "is the server up?")),
        (["-e", "http://127.0.0.1:9/?a=b", "-a", "b=http://127.0.0.1:8"], ("engine", "leave out what stands behind the path")),
    ],
)
def test_options_that_cannot_be_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], said: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_embedded", lambda *_: pytest.fail("the model was loaded"))
    refused(given, *said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "page, said",
    [
        (b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n", "--api-key-env"),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "OpenAI API"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\n\xff\xfe", "HTTP 500"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", "no list"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{\"data\": null}"[:-1] + b"}", "is the server up?"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n{\"data\": [1,2]}"[:-1] + b"}", "is the server up?"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{\"data\": []}", "no models"),
        (b"nonsense\r\n\r\n", "is the server up?"),
        (b"", "is the server up?"),
    ],
)  # fmt: skip
def test_a_server_whose_models_cannot_be_listed(page: bytes, said: str) -> None:
    with served(MockServer(answers, pages={"/v1/models": page})) as (url,), pytest.raises(SettingError, match=said):
        addresses.look("engine", url, {}, None)
