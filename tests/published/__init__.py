"""Published models for tests: their facts (`configs.py`), folders with their layout and random weights (`folders.py`), the
table of families and what each must do (`families.py`), and two whole models with their weights (`weights.py`)."""
