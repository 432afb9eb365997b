"""The viewer in a notebook: the page as a widget, and its numbers from the kernel.

A request is ``{"id", "path", "parameters"}``; its response ``{"id", "coverage"}`` with the body in
a buffer, or ``{"id", "error"}`` with a sentence. docs/viewer-protocol.md lists the paths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlencode

from regard._base.extras import needed_by
from regard._showing.picture import recording_html
from regard.recording import Recording
from regard.viewer._bundle import bundle, style_sheet
from regard.viewer.answer import Answers

with needed_by("regard.viewer.notebook"):
    import anywidget

__all__ = ["RecordingWidget"]


class RecordingWidget(anywidget.AnyWidget):
    """The viewer as a widget, which shows a recording in a notebook.

    Args:
        recording: to look at.
        other: a second recording, to compare the first with.
        names: what to call them; by default their models.

    Raises:
        ValueError: a recording without queries.

    Example:
        ``RecordingWidget(before, other=after, names=["before", "after"])`` as the last line of a
        cell.
    """

    _esm = bundle("notebook") + "export default { render };\n"
    _css = style_sheet()

    def __init__(
        self,
        recording: Recording[Any],
        *,
        other: Recording[Any] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        recordings = [recording] if other is None else [recording, other]
        self._answers = Answers.of_groups(recordings, names)
        self.on_msg(self._answer)

    def mimebundle(self, html: Callable[[], str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The widget by MIME type, with HTML for where there is no kernel, and the metadata."""
        data, metadata = super()._repr_mimebundle_() or ({}, {})
        return {**data, "text/html": html()}, metadata

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.mimebundle(lambda: "".join(map(recording_html, self._answers.recordings)))

    def close(self) -> None:
        """Takes the widget out of the notebook, and ends what it computes in the background."""
        if hasattr(self, "_answers"):
            self._answers.close()
        super().close()

    def _answer(self, _: Any, content: Any, buffers: Any) -> None:
        """Answers one message; any that is no request of the page is ignored."""
        if not (isinstance(content, dict) and {"id", "path", "parameters"} <= content.keys()):
            return
        request_id = content["id"]
        try:
            answer = self._answers.answer(str(content["path"]), _query(content["parameters"]))
        except BaseException as error:  # the page waits for a response, whatever went wrong
            told = f"{type(error).__name__}: {error}"
            if isinstance(error, KeyboardInterrupt):
                told = "The notebook's kernel was interrupted while it computed this: try again."
            self.send({"id": request_id, "error": told})
            raise
        if answer.status == 200:
            self.send({"id": request_id, "coverage": answer.coverage}, buffers=[answer.body])
        else:
            self.send({"id": request_id, "error": answer.body.decode()})


def _query(parameters: Any) -> str:
    """Parameters as a query string, without those that are null or undefined."""
    given = parameters.items() if isinstance(parameters, dict) else ()
    return urlencode({name: value for name, value in given if value is not None})
