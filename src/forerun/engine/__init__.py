"""The engine: requests in, events out. engine.py owns the parts; step.py is where a token is made."""
