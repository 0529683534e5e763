"""How requests are sent: the plan of a run, its batches, their timing, and when to stop."""
