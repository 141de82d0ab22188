"""The README's screenshots: `python tests/web/screenshots.py FOLDER` (web/screenshots if none is named)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from page_browser import ROOT, browser, server
from playwright.sync_api import Browser

QUERY = "/?model=meta-llama%2FLlama-3.1-8B&gpus=8&gpu=H100-80GB"


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture; `about` is the heading it begins at, None for the top of the page."""

    name: str
    width: int
    height: int
    scheme: Literal["light", "dark"]
    about: str | None = None


SHOTS = (
    Shot("page", 1280, 940, "light"),
    Shot("page-dark", 1280, 1100, "dark", "#tree-title"),
    Shot("page-phone", 390, 844, "light", "#verdict-title"),
)


def shoot(chromium: Browser, url: str, shots: Sequence[Shot], folder: Path) -> list[Path]:
    """Write the shots of a page into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for shot in shots:
        page = chromium.new_page(viewport={"width": shot.width, "height": shot.height}, color_scheme=shot.scheme)
        page.goto(url, wait_until="networkidle")  # with the effects of changes
        if shot.about:
            page.evaluate("at => scrollTo(0, document.querySelector(at).getBoundingClientRect().top - 32)", shot.about)
        written.append(folder / f"{shot.name}.png")
        page.screenshot(path=written[-1])
        page.close()
    return written


def main(folder: Path) -> None:
    """Take every screenshot, of a server on this machine."""
    with server() as address, browser() as chromium:
        for path in shoot(chromium, address + QUERY, SHOTS, folder):
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "web" / "screenshots")
