"""Workloads: what is asked of an engine. A built-in one is a function in tasks.py from the number of a variant to a Prompt, and
an entry in TASKS; its texts are in data/. traces.py makes workloads of a user's files.
"""
