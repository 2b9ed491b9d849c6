"""The compiler that the simulated device's programs are said to come from."""

__version__ = "2.0.0+simulated"
