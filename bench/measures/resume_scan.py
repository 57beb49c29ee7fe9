"""The start on an output folder of a million finished samples.

*Plan* is what `hs_scan` does before anything is stopped: every row of the data set read and checked, every sample's file looked for in its size.
*Client* is the client from its start to the moment in which it would send the first prompt, with a thousand of the million left. The files are
sparse: a real header, then a hole.
"""

ORDER = 90
WITH = "client_per_sample"
