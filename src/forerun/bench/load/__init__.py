"""How requests are sent: the plan of a run (plan.py), the sending of a batch (sending.py), the limits of a run's time
(budget.py) and of failures (patience.py), and the comparison of answers (equality.py).

A new kind of load provides a value of record.LoadKind, the times of its requests in `arrivals` of sending.py, its label in
record.Load and its checks in `Plan`.
"""
