"""Takes the pictures of the viewer that the documentation shows, in a real Chromium.

    python scripts/screenshots.py [-o docs/pictures] [--only sentence explained code long]

The built-in model reads two sentences, 600 tokens of code, and the first 100,000 tokens of the
standard library's source; of these the layer that attends to all of them is shown.
"""

import argparse
import shutil
import sys
import sysconfig
from pathlib import Path

from playwright.sync_api import sync_playwright

from regard.lm import LanguageModel
from regard.recording import Layer, Recording
from regard.viewer._server import Viewer

SENTENCE = "The cat slept because it was warm."
REPEATS = "the cat saw the dog and the cat saw the bird"
LONG = 100_000
CHROMIUMS = "chromium-headless-shell", "chromium", "chromium-browser"
SIZE = {"width": 1500, "height": 880}


def sources():
    """The standard library's modules, one text."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n".join(path.read_text("utf-8") for path in sorted(folder.glob("*.py")))


def sentence(model):
    """A sentence as the model reads it."""
    return model.record(SENTENCE)


def explained(model):
    """A sentence, with the gradients of the loss of its last token."""
    return model.record(REPEATS, explain=-1)


def code(model):
    """600 tokens of code."""
    text = (Path(sysconfig.get_path("stdlib")) / "bisect.py").read_text("utf-8")
    return model.record(model.tokenizer.decode(model.tokenizer.encode(text)[:600]))


def long(model):
    """100,000 tokens of code, and the layer of the model that attends to all of them."""
    ids = [model.tokenizer.bos, *model.tokenizer.encode(sources()[: 5 * LONG])]
    read = model.record_ids(ids[:LONG])
    number = next(n for n, layer in enumerate(model.config.layers) if layer.window is None)
    layer = read.layers[number]
    alone = Layer(layer.query, layer.key, causal=True, number=number)
    return Recording(read.tokens, [alone], model=read.model)


def take(page, recording, path, address, dark):
    """One picture, when the map is complete."""
    with Viewer([recording]) as viewer:
        page.emulate_media(color_scheme="dark" if dark else "light")
        page.goto(viewer.address + address)
        if "view" not in address:
            page.wait_for_selector("[data-idle=true]", timeout=120_000)
        page.wait_for_timeout(2000)
        page.screenshot(path=path)
    print(path)


PICTURES = {
    "sentence": [
        ("map", "", False),
        ("lines", "#view=lines", False),
        ("steps", "#view=steps", False),
    ],
    "explained": [("map", "#L0H7&plane=effect", False)],
    "code": [("map", "", False), ("dark", "", True)],
    "long": [("map", "", False)],
}


def main():
    """All pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/pictures"), metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    model = LanguageModel.load("builtin")
    makers = {"sentence": sentence, "explained": explained, "code": code, "long": long}
    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        for name in options.only:
            recording = makers[name](model)
            for view, address, dark in PICTURES[name]:
                file = options.output / f"{name}_{view}.png"
                take(page, recording, file, address, dark)
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
