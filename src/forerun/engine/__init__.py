"""The engine takes requests and gives events. engine.py owns the parts, step.py makes a step, cycle.py makes the tokens."""
