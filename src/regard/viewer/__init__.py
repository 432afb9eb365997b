"""The viewer: a page in the browser on a recording's every weight.

``regard view`` opens it from the command line; docs/viewer.md tells how it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regard._call.checks import read_flag
from regard.recording import Recording

if TYPE_CHECKING:
    from regard.lm import LanguageModel
    from regard.viewer._server import Viewer as Viewer
else:

    def __getattr__(name):
        """``Viewer`` is loaded when it is first used, with the packages that it needs."""
        if name == "Viewer":
            from regard.viewer._server import Viewer

            return Viewer
        raise AttributeError(f"module 'regard.viewer' has no attribute {name!r}")


__all__ = ["view"]


def view(
    recording: Recording[Any],
    *,
    other: Recording[Any] | None = None,
    words: bool | None = None,
    open_browser: bool = True,
    port: int = 0,
    names: tuple[str, ...] | None = None,
) -> Viewer:
    """Serve a recording on this machine and open it in the browser.

    It serves in the background; each call starts another viewer. The browser opens at the head that
    tells most.

    Args:
        recording: to look at.
        other: a second one to compare it with.
        words: whether the browser opens by words; by default below 200 tokens.
        open_browser: False opens none; the result has the address.
        port: 0 takes one that is free.
        names: what to call the recordings; by default their models.

    Returns:
        The viewer, with ``address`` and ``close()``; at the end of a ``with`` block, and of
        Python, it closes by itself.

    Raises:
        TypeError: no recording, a port that is no int, or ``words`` or ``open_browser`` that are no
            bools.
        ValueError: a recording without queries, or a port above 65535 or below 0.
        OSError: the port is taken.
    """
    from regard.viewer._server import Viewer

    open_browser = read_flag("open_browser", open_browser, "view")
    if words is not None:
        words = read_flag("words", words, "view")
    viewer = Viewer([recording] if other is None else [recording, other], names, port)
    if open_browser:
        import webbrowser

        from regard.heads import place_to_open

        layer, head = place_to_open(recording)
        webbrowser.open(f"{viewer.address}#L{layer}H{head}{unit_in_address(words)}")
    return viewer


def unit_in_address(words: bool | None) -> str:
    """What opens the page by words or by tokens, at the end of its address."""
    return "" if words is None else f"&unit={'word' if words else 'token'}"


def view_texts(
    model: LanguageModel, text: str = "", *, open_browser: bool = True, port: int = 0
) -> Viewer:
    """Serve a page with an input on this machine, and open it: the model reads what is typed.

    Args:
        model: reads the texts.
        text: that the page opens with; none opens it empty.
        open_browser, port: as in ``view``.

    Returns:
        The viewer, as ``view`` does.

    Raises:
        TypeError: ``text`` is no str, or ``open_browser`` no bool.
        ValueError: ``text`` is longer than the input can hold, or a port above 65535 or below 0.
        OSError: the port is taken.
    """
    from regard.lm.tokenizer import require_text
    from regard.viewer._readings import MAX_CHARACTERS, Readings, reader_of
    from regard.viewer._server import Viewer

    require_text("view: the text", text)
    open_browser = read_flag("open_browser", open_browser, "view")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"view: the text has {len(text):,} characters, and the input holds {MAX_CHARACTERS:,};"
            " model.record(text).view() shows it without one."
        )
    viewer = Viewer((), None, port, Readings(reader_of(model), text))
    if open_browser:
        import webbrowser

        webbrowser.open(viewer.address)
    return viewer
