"""One document for many tests: each has its page mounted anew, as a text that is typed has.

Loading the viewer takes more than twice the work of mounting its page again in a document that is
there, whose modules are compiled.
"""

from regard.viewer._server import Viewer
from regard.viewer.answer import Answers

LOADED = """
document.regardGlobals = new Set(Object.keys(window));
document.regardMount = () => {
  document.regardPage = null;
  MOUNTED.then((page) => { document.regardPage = page; });
};
document.regardMount();
"""
MOUNT = """(hash) => {
  history.replaceState(null, "", location.pathname + hash);
  document.regardMount();
}"""
# Whether the page could be ended. What a test left in the document goes; where its changes outlive
# that, it says so by `document.regardPage = null`.
END = """() => {
  if (!document.regardPage || !document.getElementById("regard")) return false;
  document.regardPage.end();
  stop();
  history.replaceState(null, "", location.pathname);
  const root = document.createElement("div");
  root.id = "regard";
  document.body.replaceChildren(root);
  for (const element of [document.documentElement, document.body])
    for (const name of element.getAttributeNames())
      if (!["lang", "class"].includes(name)) element.removeAttribute(name);
  document.documentElement.removeAttribute("class");
  document.title = "regard";
  getSelection().removeAllRanges();
  for (const name of Object.keys(window))
    if (!document.regardGlobals.has(name)) delete window[name];
  return true;
}"""


class Stage:
    """A viewer that serves what the test at hand gives it, always at one address."""

    def __init__(self, recording):
        self.viewer = Viewer([recording])
        self.address = self.viewer.address
        self._app = self.viewer._server.config.app
        self.is_free = True
        code, media_type = self._app._files["boot.js"]
        self._app._files = self._app._files | {"boot.js": (keeping(code), media_type)}

    def serve(self, recordings, names=None, corpus=None):
        """Serves these until the next ones."""
        self._app._answers.close()
        self._app._answers = self.viewer._answers = Answers.of_groups(recordings, names, corpus)
        self.is_free = False

    def close(self):
        self.viewer.close()


def keeping(code):
    """The page's module, whose pages can be ended, and mounted again."""
    before, call, after = code.decode().rpartition("\nstart(elementOf")
    started, _, rest = after.partition(");\n")
    assert call
    assert "\n" not in started
    return (before + LOADED.replace("MOUNTED", f"start(elementOf{started})") + rest).encode()
