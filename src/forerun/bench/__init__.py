"""The instrument: does speculation pay here?

options.py is what a user asks for; workloads.py and traces.py are the prompts, arms.py and sides.py what is compared, plan.py
the order, and command.py makes these of the options. run.py is the one runner for engines of every kind: it sends prompts by
load.py and keeps every raw sample in record.py, which keeping.py writes to disk after each batch. redaction.py keeps secrets
out of all that is written.

records/ has the record and derives figures, verdicts, comparisons and thresholds from it. pages/ shows them on a terminal, as
Markdown and as a page. Both see nothing but records.
"""
