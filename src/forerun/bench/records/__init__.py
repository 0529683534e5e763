"""What a run leaves behind: the record, its figures, the statistics on them, comparisons and thresholds."""
