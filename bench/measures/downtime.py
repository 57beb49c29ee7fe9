"""How long production is down beyond what must be: less the extraction server's loading, the extraction, and production's own loading.

On the host of control_plane, from the record before production's SIGTERM to the one after its answers were seen, in the run's journal. An engine's loading ends
when it says that it is ready, the extraction when the client is through; what is left is the stopping of two engines, the steps between, how late their
ends are seen, and the proof that production generates.
"""

ORDER = 130
WITH = "control_plane"
