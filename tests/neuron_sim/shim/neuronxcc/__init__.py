"""Stand-in for the compiler package: a version and recording stubs of its kernels."""

__version__ = "2.0.0+simulator"
