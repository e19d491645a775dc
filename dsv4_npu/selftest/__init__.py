"""The first hour on a device: every op against its oracle, the compressor, the pools, and what a call costs."""
