"""The instrument: does speculation pay here?

options.py is what a user asks for; workloads.py and traces.py are the prompts, arms.py and sides.py what is compared, plan.py
the order, and command.py makes these of the options. run.py is the one runner for engines of every kind: it sends prompts by
load.py and keeps every raw sample in record.py, which keeping.py writes to disk after each batch. redaction.py keeps secrets
out of all that is written.

statistics.py, distribution.py, latency.py and summary.py turn samples into figures and verdicts; words.py says them, report.py
puts them into tables, html.py (with svg.py and the folder page) on a page, and thresholds.py holds them against what was asked
for. compare.py and changes.py do so for two runs. Nothing after record.py sees anything but the record.
"""
