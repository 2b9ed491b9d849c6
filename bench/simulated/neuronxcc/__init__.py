"""The version of the simulated compiler."""

__version__ = "2.0.0+simulated"
