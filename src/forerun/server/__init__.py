"""The server: HTTP in one process, the engine in another. They exchange messages, one for each step.

    app.py (routes), schemas.py (requests), replies.py (answers)     the HTTP process, without torch
          | submit, close                      ^ events of one request
    client.py: starts the worker, shares the events out
          | messages.py: over a pair of sockets
    worker.py: owns the LLM, makes steps                              the engine process
"""
