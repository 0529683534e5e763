"""The record of a run, and everything that is derived from it.

record.py is the record, keeping.py its file during a run. redaction.py keeps secrets out of it, machine.py describes the
machine. statistics.py and distribution.py know numbers only. summary.py derives the figures of each cell, compare.py those of
two runs, and thresholds.py checks figures for continuous integration.
"""
