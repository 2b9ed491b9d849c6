"""One thread for torch: the models of the tests are tiny, and threads that spin would take the cores from the servers."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
