"""Records for readers. A record, or a comparison of two, becomes one view, which three renderers show.

view.py is the form of a view. report.py makes it from a record, changes.py from two; words.py has the sentences, charts.py the
charts. terminal.py, markdown.py and html.py (with the templates of the folder page) show it. junit.py writes the results of
thresholds, progress.py shows a run that goes on.
"""
