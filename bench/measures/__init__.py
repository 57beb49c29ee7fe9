"""The measurements, one a file; bench/frame.py says what a file must have."""
