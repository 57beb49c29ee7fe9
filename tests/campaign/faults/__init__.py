"""The fault matrix: each step of a run x whatever can go wrong, on real systemd hosts over real ssh.

    python -m tests.campaign.faults [--hosts 2] [--only extract:SIGKILL] [--again] [--list]

- host.py     one such host: production as a unit, small disks of its own for state and output, a fake GPU (the one thing that is faked)
- look.py     runs on the host: all that must be as before, in one JSON document
- moments.py  when a step of a run is at work
- faults.py   what goes wrong, and how it is mended where nothing but a person can mend it
- cell.py     one run with one fault at one moment, judged from outside
- table.py    docs/fault-matrix.md
"""
