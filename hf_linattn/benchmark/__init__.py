"""Measurements: `compare` and `ops` write JSON, `plots` and `tables` read it and nothing else."""
