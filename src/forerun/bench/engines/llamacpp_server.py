"""A llama.cpp server out of the Python package xllamacpp, started with the flags of llama-server that matter here. A program
of its own: it runs under the Python that has that package, which need not have Forerun, so nothing of Forerun is imported.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading

KINDS = ("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "draft-simple")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--spec-type", choices=KINDS, default="none")
    parser.add_argument("--spec-draft-n-max", type=int)
    parser.add_argument("--spec-draft-model")
    parser.add_argument("--spec-ngram-simple-size-n", type=int)
    parser.add_argument("--spec-ngram-simple-size-m", type=int)
    args = parser.parse_args()

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.model_alias = {"target"}
    params.hostnames, params.port = [args.host], args.port
    params.n_ctx, params.n_parallel = args.ctx_size, args.parallel
    params.endpoint_metrics = True
    # the package's own default is 4, whatever the machine has; llama-server takes one for each core
    params.cpuparams.n_threads = args.threads or (os.cpu_count() or 1)
    if args.spec_type != "none":
        name = f"COMMON_SPECULATIVE_TYPE_{args.spec_type.replace('-', '_').upper()}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
    if args.spec_draft_n_max is not None:
        params.speculative.draft.n_max = args.spec_draft_n_max
    if args.spec_draft_model is not None:
        params.speculative.draft.mparams.path = args.spec_draft_model
    if args.spec_ngram_simple_size_n is not None:
        params.speculative.ngram_simple.size_n = args.spec_ngram_simple_size_n
    if args.spec_ngram_simple_size_m is not None:
        params.speculative.ngram_simple.size_m = args.spec_ngram_simple_size_m
    print(f"build info: xllamacpp-{xllamacpp.__version__}", flush=True)  # its BUILD_INFO names no build of llama.cpp
    print(f"system_info: {xllamacpp.get_system_info()}", flush=True)
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()


if __name__ == "__main__":
    main()
