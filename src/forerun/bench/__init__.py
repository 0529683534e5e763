"""The instrument: does speculation pay here?

options.py has the options of a user, command.py makes a plan and a subject of them, and run.py, the one runner for engines of
every kind, measures the plan and makes a record. workloads/ has the prompts, load/ the plan and the sending of requests,
engines/ the arms and what answers their requests. The docstring of each of these packages says what a new one must provide.

records/ has the record and derives figures, verdicts, comparisons and thresholds from it. pages/ shows them on a terminal, as
Markdown and as a page. Both see nothing but records.
"""
