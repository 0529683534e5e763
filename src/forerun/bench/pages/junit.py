"""The checks of a run's thresholds as a JUnit XML file, for continuous integration."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from forerun.bench.pages.words import headline
from forerun.bench.records.record import Record
from forerun.bench.records.thresholds import Check, line


def junit(checks: Sequence[Check], record: Record) -> str:
    """A test case for each threshold and cell."""
    failures = sum(not c.passed for c in checks)
    counts = {"tests": str(len(checks)), "failures": str(failures), "errors": "0", "time": f"{record.seconds:.3f}"}
    root = ElementTree.Element("testsuites", counts)
    stamp = record.started.partition("+")[0]
    suite = ElementTree.SubElement(root, "testsuite", {"name": "forerun bench", **counts, "skipped": "0", "timestamp": stamp})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in {"model": record.settings.model, "machine": record.machine.cpu, **record.versions}.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": value})
    for c in checks:
        case = ElementTree.SubElement(suite, "testcase", {"classname": c.threshold.text, "name": c.where, "time": "0"})
        if not c.passed:
            ElementTree.SubElement(case, "failure", {"type": "threshold", "message": line(c)})
    answer, arms = headline(record)
    ElementTree.SubElement(suite, "system-out").text = "\n".join([f"{answer}.", *[f"{arm}: {text}." for arm, text in arms]])
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
