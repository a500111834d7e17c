"""The hosts of a job: which they are, how many ranks each has, and the command with which a launcher reaches them.

A hostfile, filters and counts select hosts and slots (`hostfile`). A launcher is a row of a table that turns them into
commands (`launchers`). Every launcher starts the same process, once on each host; no launcher carries the environment.
"""
