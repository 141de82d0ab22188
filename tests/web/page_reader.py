"""Requests pages, and parses their HTML."""

from __future__ import annotations

from html.parser import HTMLParser

from fsdp_advisor.server.page_form import EXAMPLE

__all__ = ["EXAMPLE", "HOSTILE", "JOBS", "PAGES", "read"]

_PLAN = "model%3Dopenai-community%252Fgpt2%26strategy%3D"
PAGES = ("/", f"/compare?a={_PLAN}ddp&b={_PLAN}zero2", "/how", "/accuracy", "/models", "/gpus")
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}'
JOBS = {
    "the default": {},
    "one GPU": {"model": "openai-community/gpt2", "gpu": "24GiB"},
    "nodes": {"model": "meta-llama/Llama-3.1-8B", "gpus": "16", "nnodes": "2", "gpu": "A100-40GB"},
    "nothing fits": {"model": "openai-community/gpt2-xl", "gpus": "2", "gpu": "8GiB", "offload": "none"},
    "a count": {"model": "7B", "gpus": "4"},
    "one strategy": {"model": "meta-llama/Llama-2-7b-hf", "gpus": "4", "strategy": "ddp", "micro_batch_size": "1"},
    "no decoder": {"model": "google/vit-base-patch16-224", "gpus": "2"},
    "find": {
        "model": "openai-community/gpt2",
        "gpus": "2",
        "gpu": "24GiB",
        "find": "batch",
        "tokens": "1B",
        "price": "2",
    },
    "a size alone": {"model": "openai-community/gpt2", "gpus": "2", "gpu": "40GiB"},
}


class _Reader(HTMLParser):
    """Elements with their attributes, and whether every one is closed."""

    VOID = frozenset({"meta", "link", "input", "br", "col", "img"})
    MAY_STAY_OPEN = frozenset({"option", "tr", "td", "th"})
    """Elements that HTML closes automatically when the next one begins or their parent ends."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while tag not in self.MAY_STAY_OPEN and self.open[-1] in self.MAY_STAY_OPEN:
            self.open.pop()
        assert tag in self.MAY_STAY_OPEN or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> _Reader:
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader
