"""Is the edit of deepseek_v2.py right on every release of SGLang? Runs the releases' own code and looks (``make compat``)."""
