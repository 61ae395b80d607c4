"""The page "lowcomm" of torch's debug server, in rank 0's front end; importing it needs jinja2."""

from __future__ import annotations

import json
from typing import Any

from torch.distributed.debug._frontend import DebugHandler, NavLink, Route, fetch_all

from torch_lowcomm.live.handlers import HANDLER
from torch_lowcomm.live.view import View

_PAGE = """{% extends "base.html" %}
{% block header %}<h1>{% block title %}lowcomm{% endblock %}</h1>{% endblock %}
{% block content %}<meta http-equiv="refresh" content="2"><style>section { max-width: none; overflow: auto }</style>
<pre style="white-space: pre">{{ text | e }}</pre>
<p><a href="/lowcomm?all">all links</a> &middot; <a href="/lowcomm_text">as text</a></p>{% endblock %}"""


class LowcommPage(DebugHandler):
    """Asks all ranks for their accounts, and shows them as HTML that reloads itself and as text."""

    def __init__(self) -> None:
        self._view = View()

    def routes(self) -> list[Route]:
        """See DebugHandler."""
        return [Route("/lowcomm", self._html), Route("/lowcomm_text", self._text)]

    def nav_links(self) -> list[NavLink]:
        """See DebugHandler."""
        return [NavLink("/lowcomm", "lowcomm")]

    def templates(self) -> dict[str, str]:
        """See DebugHandler."""
        return {"lowcomm.html": _PAGE}

    def _text(self, request: Any) -> bytes:
        return f"{self._shown(request.get_raw_query())}\n".encode()

    def _html(self, request: Any) -> bytes:
        return request.frontend.render_template("lowcomm.html", text=self._shown(request.get_raw_query()))

    def _shown(self, query: str) -> str:
        limit = {"timeout": self.fetch_timeout} if hasattr(self, "fetch_timeout") else {}  # not in torch 2.11
        _, answers = fetch_all(HANDLER, **limit)
        accounts = [json.loads(of.text) if of.status_code == 200 else " ".join(of.text.split())[:200] for of in answers]
        return self._view.text(accounts, all_links="all" in query)
