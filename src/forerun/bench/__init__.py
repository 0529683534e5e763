"""The instrument: does speculation pay here? workloads.py is what is asked, arms.py what is compared, embedded.py runs it
on the engine in this process, record.py keeps every raw sample, statistics.py and summary.py turn samples into figures and
verdicts, and report.py into tables and sentences. Nothing after record.py sees anything but the record.
"""
