"""Logs of trainings that were never made, for tests of the learning curve."""

from __future__ import annotations

from forerun.train.log import Line

SETTINGS = {"method": "eagle3", "target": "<b>a model</b>", "steps": 2000, "tokens": 15360, "states": [2, 15, 27], "pace": None}


def rich(steps: int = 2000, k: int = 4) -> list[Line]:
    """400 lines of losses, ten evaluations, two with the engine."""
    found: list[Line] = []
    for step in range(5, steps + 1, 5):
        part = step / steps
        accuracy = [round(0.7 * part**0.3 - 0.05 * i, 4) for i in range(5)]
        line = {"kind": "step", "step": step, "loss": 6 - 4 * part**0.3, "norm": 1.0, "rate": 1e-3 * (1 - part)}
        found.append({**line, "accuracy": accuracy})
        if step % (steps // 10) == 0:
            lengths = [1 + (i + 1) * 0.4 * part**0.5 for i in range(k)]
            accepted = [0.8 * part**0.5 * 0.8**i for i in range(k)]
            found.append({"kind": "offline", "step": step, "lengths": lengths, "accepted": accepted, "samples": 480})
        if step % (steps // 2) == 0:
            names = ("explain", "edit-code", "a-task-with-a-very-long-name-of-many-words")
            tasks = [
                {"task": name, "prompts": 32, "tokens": 6000, "steps": 2500 - 500 * i, "length": 2.4 + i, "accepted": accepted}
                for i, name in enumerate(names)
            ]
            found.append({"kind": "engine", "step": step, "k": k, "tasks": tasks})
    phases = {"answers": 110.2, "steps": 165.0, "evaluation": 3.1, "engine": 24.0}
    return found + [{"kind": "phase", "name": name, "seconds": s, "step": steps} for name, s in phases.items()]
