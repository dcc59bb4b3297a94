"""The HTML page for chatting with a model: one file without external resources, which escapes all text."""

import importlib.resources

from jaxscale.system.redact import in_html

FILES = importlib.resources.files("jaxscale.runtime.sampling")
STYLE, SCRIPT = (FILES.joinpath(name).read_text("utf-8") for name in ("chat.css", "chat.js"))


def chat_page(title: str) -> str:
    """Returns the HTML of the page. title: of the model."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>jaxscale chat</title><style>{STYLE}</style></head><body>"
        f"<header>{in_html(title)}</header>"
        '<main id="turns" aria-live="polite"></main><div class="note" id="note" role="status"></div>'
        '<form id="form"><textarea id="box" rows="2" aria-label="Your message" placeholder="Your message"></textarea>'
        '<button id="send">Send</button><button id="new" type="button">New</button></form>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )
