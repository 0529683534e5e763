"""The instrument: does speculation pay here? workloads.py is what is asked, arms.py what is compared, embedded.py runs it
on the engine in this process, record.py keeps every raw sample. statistics.py, distribution.py, latency.py and summary.py turn
samples into figures and verdicts; words.py says them, report.py puts them into tables, html.py (with svg.py and the folder
page) on a page, and thresholds.py holds them against what was asked for. compare.py and changes.py do so for two runs. Nothing
after record.py sees anything but the record.
"""
