"""The Python files of the product."""

from run import HERE

FOLDERS = ("api", "text", "engine", "models")
FILES = [*sorted(HERE.glob("*.py")), *(path for folder in FOLDERS for path in sorted((HERE / folder).glob("**/*.py")))]
