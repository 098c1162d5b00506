"""The README as the package's page, where no file lies beside it: files that it links to are named.

Everything else about the package is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|mailto:|#)(?P<target>[^)\s]+)\)")


def package_page(readme: str) -> str:
    """``readme`` with each link to a file of the repository as the file's name; pictures are left out."""

    def named(link: re.Match[str]) -> str:
        if link["picture"]:
            return ""
        name = f"`{link['target']}`"
        return name if link["text"] == link["target"] else f"{link['text']} ({name})"

    return LINK.sub(named, readme)


setup(
    long_description=package_page((Path(__file__).parent / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
