"""Reading raw text of every kind, bounded in memory, each document with where it came from."""

from jaxscale.text.sources.files import SourceFile, list_files, stdlib_files, text_problem
from jaxscale.text.sources.read import parts, read_file
from jaxscale.text.sources.settings import WHOLE, Part, ReadConfig

__all__ = [
    "WHOLE", "Part", "ReadConfig", "SourceFile", "list_files", "parts", "read_file", "stdlib_files", "text_problem",
]  # fmt: skip
