"""For tests of pages: what one would load."""

from html.parser import HTMLParser

_BOXES = ("section", "div", "details", "table", "tr", "dl", "nav", "body", "html")


class Parsed(HTMLParser):
    """A page's elements, as far as tests ask for them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        """Everything it would fetch or link to, but places in itself."""
        self.images: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.unclosed: list[str] = []
        """Boxes that are open; one that is closed out of turn stays."""
        self.unscrolled: list[str] = []
        """Tables and pictures that are in no box that scrolls: a narrow window would cut them."""
        self._scrolls: list[bool] = []
        """Of the `div` elements that are open."""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            elif name == "href" and str(value).startswith("#"):
                self.links.append(str(value)[1:])
            elif name == "src" and str(value).startswith("data:image/svg+xml;base64,"):
                self.images.append(str(value).partition(",")[2])
            elif name in ("src", "href", "srcset", "data", "action"):
                self.loads.append(f"{tag} {name}={value}")
        self.unclosed += [tag] if tag in _BOXES else []
        if tag == "div":
            self._scrolls.append("wide" in str(dict(attrs).get("class")).split())
        elif tag in ("table", "img") and not any(self._scrolls):
            self.unscrolled.append(tag)
        if tag in ("script", "link", "iframe", "object", "embed"):
            self.loads.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "div" and self._scrolls:
            self._scrolls.pop()
        if tag in _BOXES and self.unclosed[-1:] == [tag]:
            self.unclosed.pop()
        elif tag in _BOXES:
            self.unclosed.append(f"/{tag}")
