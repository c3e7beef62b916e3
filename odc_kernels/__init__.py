"""GPU transfers, calibration and training for ODC; CPU stand-ins where there is no GPU.

Importing this package loads nothing heavy: torch and triton are imported by the modules that use them.
"""
