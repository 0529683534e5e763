"""The engines that can be measured, each behind the same two interfaces.

endpoint.py: `Endpoint` answers requests. openai.py is one over HTTP, inprocess.py one for the engine in this process.
sides.py: `Side` brings an endpoint up and down for one arm of a comparison (arms.py). subject.py holds the sides of a run.

A new adapter for a server with the OpenAI API provides a table in dialects.toml (the fields and metrics that it has beyond
that API) and, if the server is to be started here, a file launch/NAME.toml (its command line and what its log says;
launch/vllm.toml explains the keys). A new adapter for anything else provides a subclass of `Side` with an `Endpoint`.
"""
