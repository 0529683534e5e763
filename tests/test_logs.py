"""The reason why a program ended, from logs in the form in which engines and shells write them."""

# ruff: noqa: E501

from __future__ import annotations

import pytest

from forerun.bench.engines import logs

NOISE = "\n".join(f"INFO 11-29 18:00:{i:02} [loader.py:{i}] loading part {i}" for i in range(60))
VLLM_MEMORY = (
    "Available memory on node 0 (3.40/7.75 GiB) on startup is less than desired CPU memory utilization (0.92, 7.13 GiB). On the "
    "CPU backend, the `--gpu-memory-utilization` flag controls the fraction of CPU memory reserved (despite its name)."
)

VLLM_CPU = f"""\x1b[0;36m(APIServer pid=11)\x1b[0;0m INFO 11-29 18:00:00 [utils.py:233] vLLM API server version 0.32.0
(EngineCore pid=12) WARNING 11-29 18:00:05 [cpu.py:140] libtcmalloc is not found in LD_PRELOAD. RuntimeError: slow allocation may follow.
(EngineCore pid=12) ERROR 11-29 18:00:09 [core.py:515] EngineCore failed to start.
(EngineCore pid=12) ERROR 11-29 18:00:09 [core.py:515] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-29 18:00:09 [core.py:515]   File "/x/vllm/v1/engine/core.py", line 506, in run_engine_core
(EngineCore pid=12) ERROR 11-29 18:00:09 [core.py:515]     engine_core = EngineCoreProc(*args, **kwargs)
(EngineCore pid=12) ERROR 11-29 18:00:09 [core.py:515]                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
(EngineCore pid=12) ERROR 11-29 18:00:09 [core.py:515] ValueError: {VLLM_MEMORY}
(EngineCore pid=12) Process EngineCore:
(EngineCore pid=12) Traceback (most recent call last):
(EngineCore pid=12)   File "/usr/lib/python3.12/multiprocessing/process.py", line 314, in _bootstrap
(EngineCore pid=12)     self.run()
(EngineCore pid=12) ValueError: {VLLM_MEMORY}
{NOISE}
(APIServer pid=11) Traceback (most recent call last):
(APIServer pid=11)   File "/x/bin/vllm", line 8, in <module>
(APIServer pid=11)     sys.exit(main())
(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore': 1}}
/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: There appear to be 1 leaked shared_memory objects
  warnings.warn('resource_tracker: There appear to be %d leaked shared_memory objects: Error' % 1)"""

GPU = """INFO 06-30 13:53:19 [worker.py:1] starting
ERROR 06-30 13:53:19 [core.py:515] Traceback (most recent call last):
ERROR 06-30 13:53:19 [core.py:515]   File "/x/gpu_worker.py", line 145, in init_device
ERROR 06-30 13:53:19 [core.py:515] ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization
RuntimeError: Engine core initialization failed. See root cause above."""

TORCH = """Traceback (most recent call last):
  File "serve.py", line 3, in <module>
    model.cuda()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB
[rank0]:[W1129 18:00:00.000 ProcessGroupNCCL.cpp:1] Warning: WARNING: destroy_process_group() was not called; error may follow"""

PYDANTIC = """Traceback (most recent call last):
  File "/x/bin/vllm", line 8, in <module>
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (4096) is greater than the derived max_model_len (max_position_embeddings=2048) [type=value]
    For further information visit https://errors.pydantic.dev/2.11/v/value_error"""

CAUSE = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
OSError: [Errno 28] No space left on device

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 2, in <module>
RuntimeError: the cache could not be written"""

HANDLING = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'flash_attn'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in <module>
ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"""

HANDLED = """ERROR 11-29 [x.py:1] could not import the extension: see below
ERROR 11-29 [x.py:1] Traceback (most recent call last):
ERROR 11-29 [x.py:1] ModuleNotFoundError: No module named 'optional'
INFO 11-29 [x.py:2] going on without it
Traceback (most recent call last):
  File "m.py", line 9, in <module>
huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error: no such model"""

UVICORN = """INFO:     Started server process [1234]
INFO:     Waiting for application startup.
INFO:     Application startup complete.
ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use
INFO:     Waiting for application shutdown."""

SOCKET = """Traceback (most recent call last):
  File "/x/api_server.py", line 500, in create_server_socket
    sock.bind(addr)
OSError: [Errno 98] Address already in use"""

SGLANG = """[2026-11-29 18:00:00] WARNING server_args.py:900: attention backend error prone, using triton
[2026-11-29 18:00:05] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/scheduler.py", line 2000, in run_scheduler_process
    scheduler = Scheduler(server_args)
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.

[2026-11-29 18:00:05] Received sigquit from a child process. It usually means the child failed.
Killed"""

TRT = """[11/29/2026-18:00:00] [TRT-LLM] [W] Error code 3 may be ignored
[11/29/2026-18:00:01] [TRT-LLM] [I] Starting
[11/29/2026-18:00:02] [TRT-LLM] [E] Failed to initialize executor on rank 0: max_seq_len 99999 is too large"""

LLAMA_FILE = """build: 5000 (abc) with gcc
ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected
main: loading model
gguf_init_from_file_impl: failed to open GGUF file 'none.gguf' (No such file or directory)
llama_model_load: error loading model: llama_model_loader: failed to load model from none.gguf
common_init_from_params: failed to load model 'none.gguf'
srv    load_model: failed to load model, 'none.gguf'
main: exiting due to model loading error"""

LLAMA_FLAG = """error: invalid argument: --spec-tpye
usage: llama-server [options]"""

LLAMA_PORT = """main: HTTP server is listening
start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080
srv    operator(): cleaning up before exit..."""

CPP = """terminate called after throwing an instance of 'std::runtime_error'
  what():  unexpectedly reached end of file
Aborted (core dumped)"""

ASSERT = """load_tensors: ok
/x/ggml/src/ggml.c:1234: GGML_ASSERT(ctx->mem_buffer != NULL) failed
Aborted (core dumped)"""

ARGPARSE = """usage: vllm serve [model_tag] [options]
vllm: error: unrecognized arguments: --speculative-modle small"""

LIBRARY = "llama-server: error while loading shared libraries: libcurl.so.4: cannot open shared object file: No such file or directory"
SHELL = "start.sh: line 3: vllm: command not found"
ILLEGAL = "loading\nIllegal instruction (core dumped)"
TYPER = """╭─ Error ─────────────────╮
Usage: serve [OPTIONS]
ERROR: No such option: --foo"""
RUST = "INFO router starting\nthread 'main' panicked at src/main.rs:10: called unwrap on None"
CLEAN = "INFO all is well\nWARNING 11-29 [x.py:1] Async scheduling disabled after error recovery\nUserWarning: an Error: odd"
ONLY_OTHERS = "INFO x\nRuntimeError: Engine core initialization failed. See root cause above."

TABLE = [
    (VLLM_CPU, "ValueError: Available memory on node 0 (3.40/7.75 GiB) on startup is less than desired"),
    (GPU, "ValueError: Free memory on device (31.44/47.38 GiB)"),
    (TORCH, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
    (PYDANTIC, "ModelConfig Value error, User-specified max_model_len (4096) is greater"),
    (CAUSE, "OSError: [Errno 28] No space left on device"),
    (HANDLING, "ImportError: libcudart.so.12: cannot open shared object file"),
    (HANDLED, "huggingface_hub.errors.RepositoryNotFoundError: 404"),
    (UVICORN, "[Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use"),
    (SOCKET, "OSError: [Errno 98] Address already in use"),
    (SGLANG, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
    (TRT, "Failed to initialize executor on rank 0: max_seq_len 99999 is too large"),
    (LLAMA_FILE, "gguf_init_from_file_impl: failed to open GGUF file 'none.gguf' (No such file or directory)"),
    (LLAMA_FLAG, "error: invalid argument: --spec-tpye"),
    (LLAMA_PORT, "start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080"),
    (CPP, "what():  unexpectedly reached end of file"),
    (ASSERT, "GGML_ASSERT(ctx->mem_buffer != NULL) failed"),
    (ARGPARSE, "vllm: error: unrecognized arguments: --speculative-modle small"),
    (LIBRARY, "error while loading shared libraries: libcurl.so.4"),
    (SHELL, "vllm: command not found"),
    (ILLEGAL, "Illegal instruction (core dumped)"),
    (TYPER, "No such option: --foo"),
    (RUST, "panicked at src/main.rs:10"),
    (ONLY_OTHERS, "RuntimeError: Engine core initialization failed"),
]


@pytest.mark.parametrize("log, said", TABLE, ids=range(len(TABLE)))
def test_the_reason_is_found(log: str, said: str) -> None:
    found = logs.reason(log)
    assert found is not None and said in found and "\n" not in found and len(found) <= logs.LONGEST


@pytest.mark.parametrize("log, said", TABLE, ids=range(len(TABLE)))
def test_it_is_found_between_much_else(log: str, said: str) -> None:
    """Warnings with the word error in them come before and behind, and colours and prefixes of another process on each line."""
    warnings = "\n".join(f"WARNING 11-29 18:00:00 [w.py:{i}] RuntimeError: harmless, error {i} was ignored" for i in range(40))
    coloured = "\n".join(f"\x1b[1;31m{line}\x1b[0m" for line in log.splitlines())
    for text in (f"{warnings}\n{NOISE}\n{log}\n{NOISE}\n{warnings}", coloured, log.replace("\n", "\r\n")):
        found = logs.reason(text)
        assert found is not None and said in found


@pytest.mark.parametrize("log", ["", "\n\n", CLEAN, NOISE])
def test_no_reason_is_made_up(log: str) -> None:
    assert logs.reason(log) is None


def test_how_a_process_ended() -> None:
    assert logs.ended(3) == "ended with code 3" and logs.ended(0) == "ended with code 0"
    assert "SIGKILL" in logs.ended(-9) and "memory" in logs.ended(137)
    assert "SIGSEGV" in logs.ended(-11) and "SIGILL" in logs.ended(-4) and logs.ended(-999) == "ended with code -999"
