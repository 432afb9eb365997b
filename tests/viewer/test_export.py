"""One HTML file that needs no server, no network and no trust in its tokens."""

import base64
import html
import math
import re
from pathlib import Path
from posixpath import join, normpath

import numpy as np
import pytest

import regard
from regard.recording import Layer, Recording
from regard.viewer._bundle import IMPORT, SHEETS, BundleError, bundle, page_paths, style_sheet
from regard.viewer.export import export
from viewer.pages import share

ROOT = Path(__file__).parents[2]
MODEL = "</title><script>window.run = 5</script>"
PANELS = {
    "readout": "[role=status]",
    "text": ".regard-text",
    "heads": ".regard-heads",
    "centre": ".regard-centre",
}


def numbers(*shape, seed=0):
    return (1.5 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def recording(tokens=24, layers=2, heads=4, size=8, **more):
    """Causal heads, two of which share their keys."""
    texts = [
        (" " if n else "") + ["the", "cat", "saw", "a", "bird", "and"][n * n % 6]
        for n in range(tokens)
    ]
    made = [
        Layer(
            numbers(heads, tokens, size, seed=3 * n),
            numbers(heads // 2, tokens, size, seed=3 * n + 1),
            numbers(heads // 2, tokens, size, seed=3 * n + 2),
            causal=True,
        )
        for n in range(layers)
    ]
    return Recording(more.pop("texts", texts), made, **{"model": "made", **more})


# The texts of the panels, once they are complete and have stood still for 0.3 seconds; looked at 20
# times a second. After 20 seconds an error.
REST = """async (panels) => {
  const read = ([name, place]) => [name, document.querySelector(place).innerText];
  let [last, still] = ["", 0];
  for (let turn = 0; turn < 400; turn++) {
    const found = Object.fromEntries(Object.entries(panels).map(read));
    const now = JSON.stringify(found);
    still = now === last ? still + 1 : 0;
    last = now;
    const complete = found.readout.includes("weight") && !found.heads.includes(" read.");
    if (still >= 6 && complete) return found;
    await new Promise((done) => setTimeout(done, 50));
  }
  throw new Error(`the page does not come to rest: ${last}`);
}"""


def shown(page):
    """The texts of the panels."""
    page.wait_for_selector(".regard-frame")
    return page.evaluate(REST, PANELS)


@pytest.fixture
def exported(tmp_path, open_page):
    """Exports and opens the file: ``exported(recording, hash, **options) -> page``."""

    def start(found, place="", **options):
        path = tmp_path / "page.html"
        export(found, path, **options)
        page = open_page(path.as_uri() + place, offline=True)
        page.file = path
        return page

    return start


def cells(page):
    """The bytes of the map, once all is drawn."""
    shown(page)
    data = page.evaluate(
        """() => {
          const canvas = document.querySelector(".regard-map-cells");
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          let binary = "";
          for (const byte of data) binary += String.fromCharCode(byte);
          return btoa(binary);
        }"""
    )
    return np.frombuffer(base64.b64decode(data), np.uint8)


class TestPage:
    @pytest.mark.parametrize(
        ("tokens", "place"),
        [
            (24, "#L1H2&query=20&key=7"),
            (24, "#L0H3&view=steps&query=20&key=7"),
            (24, "#L0H3&query=20&key=7&side=by&plane=mass&scale=uniform"),
            (600, "#L1H1&query=599&key=17"),
            (600, "#L1H1&query=300&key=17&view=steps"),
        ],
    )
    def test_it_shows_the_numbers_of_the_server(self, exported, serve, open_page, tokens, place):
        found = recording(tokens, heads=4 if tokens < 100 else 2)
        offline = shown(exported(found, place))
        assert offline == shown(open_page(serve(found) + place))
        assert re.search(r"weight \d", offline["readout"])

    @pytest.mark.parametrize(
        "place",
        [
            "#L1H1&query=599&key=17&plane=mass",
            "#L0H1&query=599&key=17&x=450&y=460&zoom=4",
            "#L0H1&query=599&key=17&compare=difference&other=L1H0&scale=uniform",
        ],
    )
    def test_it_draws_the_map_of_the_server(self, exported, serve, open_page, place):
        found = recording(600, heads=2)
        pages = exported(found, place), open_page(serve(found) + place)
        offline, online = (cells(page) for page in pages)
        assert len(np.unique(online)) > 100
        # A rounding may lie on the other side of the step between two colours.
        assert np.mean(offline != online) < 1e-3
        assert np.abs(offline.astype(int) - online).max() <= 2

    @pytest.mark.parametrize("sinks", [False, True])
    def test_weights_that_exist_are_shown_and_have_no_steps(
        self, exported, serve, open_page, sinks
    ):
        made = recording(24)
        given = [np.asarray(weights) * (0.75 if sinks else 1) for weights in made.weights]
        dense = Recording.from_weights(made.tokens, given, sinks=sinks)
        place = "#L1H2&query=20&key=7"
        page = exported(dense, place)
        offline = shown(page)
        assert offline == shown(open_page(serve(dense) + place))
        assert f"weight {share(given[1][2, 20, 7])}" in offline["readout"]
        for one in (page, open_page(serve(dense) + place)):
            one.evaluate("location.hash = '#L1H2&query=20&key=7&view=steps'")
            told = one.get_by_text("This recording was made of weights alone")
            told.wait_for()
            assert one.locator(".regard-flow").is_hidden()

    def test_it_asks_nobody_for_anything(self, exported):
        page = exported(recording())
        shown(page)
        assert page.requests == [page.file.as_uri()]

    @pytest.mark.parametrize("sandbox", ["", " sandbox=allow-scripts"])
    def test_in_a_frame_without_an_address_it_works(self, open_page, tmp_path, sandbox):
        path, outer = tmp_path / "page.html", tmp_path / "outer.html"
        recording().export(path)
        inner = html.escape(path.read_text("utf-8"))
        outer.write_text(
            f"<!doctype html><meta charset=utf-8><link rel=icon href=data:,><iframe{sandbox}"
            f' style="width: 1200px; height: 650px" srcdoc="{inner}"></iframe>',
            "utf-8",
        )
        page = open_page(outer.as_uri(), offline=True)
        frame = page.frame_locator("iframe")
        frame.locator(".regard-head").nth(6).click()
        frame.locator("[role=status]", has_text="L1H2 · query 23").wait_for()
        frame.locator(".regard-map-stage").press("ArrowUp")
        frame.locator("[role=status]", has_text="query 22").wait_for()
        frame.locator("body").press("v")
        frame.locator(".regard-lines[data-shown^='L1 heads 2 query 22']").wait_for()

    @pytest.mark.parametrize("part", [0.999, 0.3])
    def test_a_file_that_was_cut_says_so(self, open_page, tmp_path, part):
        path = tmp_path / "page.html"
        recording(2000).export(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(part * len(whole))])
        page = open_page(path.as_uri(), offline=True)
        assert "the file is cut: copy or export it again." in page.locator("body").inner_text()

    def test_nothing_but_its_own_script_can_run_or_fetch(self, exported):
        page = exported(recording())
        shown(page)
        found = page.evaluate(
            """async () => {
              const script = document.createElement("script");
              script.textContent = "window.run = true";
              document.body.append(script);
              const failed = await fetch("https://example.org/").then(() => "", () => "refused");
              return [window.run ?? null, failed];
            }"""
        )
        assert found == [None, "refused"]
        assert all("Content Security Policy" in text for text in page.complaints)
        page.complaints.clear()

    def test_hostile_tokens_stay_text(self, exported):
        hostile = [
            "</script><script>window.run = 1</script>",
            "<!--",
            "<!-- <script>",
            "]]>",
            "<img src=x onerror='window.run = 2'>",
            "${window.run = 3}",
            '"};window.run = 4;//',
            "\u2028\u2029",
            "\ud800",
            "\x00",
            "\u202egnp.exe",
            "</title><b>",
        ]
        found = recording(len(hostile), texts=hostile, model=MODEL)
        page = exported(found, "#L0H0&query=11&key=4", names=["</script>"])
        texts = shown(page)
        assert page.evaluate("window.run ?? null") is None
        assert page.evaluate("document.querySelectorAll('img, body b script').length") == 0
        assert page.title() == "</script> · regard"
        assert "onerror" in texts["readout"]

    def test_two_recordings_stand_side_by_side(self, exported, serve, open_page):
        one, other = recording(), recording(30, layers=1, model="another")
        place = "#L0H1&recording=1&query=28&key=3"
        offline = shown(exported(one, place, other=other))
        assert "another" in offline["readout"] or "28" in offline["readout"]
        assert offline == shown(open_page(serve(one, other) + place))

    def test_chosen_layers_keep_their_numbers(self, exported, serve, open_page):
        found = recording(layers=4)
        page = exported(found, "#L3H2&query=20&key=7", layers=[3, 1])
        offline = shown(page)
        online = shown(open_page(serve(found) + "#L3H2&query=20&key=7"))
        assert offline["readout"] == online["readout"]
        assert offline["text"] == online["text"]
        rows = page.locator(".regard-layer-name")
        assert rows.all_inner_texts() == ["1", "3"]


class TestFile:
    def test_its_title_has_the_names_it_was_given(self, tmp_path):
        path = tmp_path / "page.html"
        export(recording(), path, other=recording(), names=["before", "<after>"])
        assert "<title>before and &lt;after&gt;</title>" in path.read_text("utf-8")

    @pytest.mark.parametrize("limit", [float("nan"), 0, -1, -math.inf])
    def test_a_limit_that_is_none_is_refused(self, tmp_path, limit):
        with pytest.raises(ValueError, match=f"limit_bytes is {limit}; a number of bytes above 0"):
            recording().export(tmp_path / "page.html", limit_bytes=limit)
        assert not (tmp_path / "page.html").exists()

    @pytest.mark.parametrize("limit", [True, "64e6", None])
    def test_a_limit_that_is_no_number_is_refused(self, tmp_path, limit):
        with pytest.raises(TypeError, match=f"limit_bytes is {limit!r}; a number of bytes"):
            recording().export(tmp_path / "page.html", limit_bytes=limit)

    def test_a_limit_may_be_infinite(self, tmp_path):
        recording().export(tmp_path / "page.html", limit_bytes=math.inf)
        assert (tmp_path / "page.html").exists()

    def test_its_size_follows_the_tokens_and_not_their_square(self, tmp_path):
        sizes = []
        for tokens in (1000, 2000, 4000):
            found = recording(tokens, layers=1)
            found.export(tmp_path / "page.html")
            sizes.append((tmp_path / "page.html").stat().st_size)
        assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.05)
        held = 2000 * 8 * (4 + 2 + 2) * 4
        assert (sizes[2] - sizes[1]) / held < 1.25  # base64 of 0.83 of it, and the tokens

    def test_without_its_numbers_it_has_the_size_that_the_docs_say(self, tmp_path):
        recording(1, layers=1).export(tmp_path / "page.html")
        text = (ROOT / "docs" / "viewer-export.md").read_text(encoding="utf-8")
        said = int(re.search(r"Style and script, about (\d+) kB", text)[1])
        assert (tmp_path / "page.html").stat().st_size / 1e3 == pytest.approx(said, abs=10)

    def test_above_the_limit_it_says_what_was_found_and_the_way_out(self, tmp_path):
        found = recording(2000, layers=3)
        with pytest.raises(regard.MaterializeError) as error:
            found.export(tmp_path / "page.html", limit_bytes=400_000)
        assert str(error.value) == (
            "export: 3 layers × 4 heads × 2,000 tokens hold 1.5 MB of query, key and value; packed"
            " into one page they are above the limit of 400.0 kB.\n"
            "  Choose layers with layers=[0, 5], record fewer tokens, allow more with"
            " limit_bytes=..., or look at all of it with regard view."
        )
        with pytest.raises(regard.MaterializeError, match=r"above the limit of 1\.5 MB"):
            found.export(tmp_path / "page.html", limit_bytes=1_500_000)
        assert list(tmp_path.iterdir()) == []
        found.export(tmp_path / "page.html", layers=[1], limit_bytes=1_500_000)

    def test_a_large_bias_is_named_as_what_is_too_large(self, tmp_path):
        q, k = numbers(2, 300, 4), numbers(2, 300, 4)
        found = Recording(["a"] * 300, [Layer(q, k, bias=numbers(2, 300, 300))])
        with pytest.raises(regard.MaterializeError, match=r"and bias and mask of 720.0 kB"):
            found.export(tmp_path / "page.html", limit_bytes=500_000)

    @pytest.mark.parametrize("limit", [1_000, 300_000])
    def test_an_export_that_fails_keeps_the_old_file(self, tmp_path, limit):
        path = tmp_path / "page.html"
        path.write_text("the old one")
        with pytest.raises(regard.MaterializeError):
            recording(4000).export(path, limit_bytes=limit)
        assert path.read_text() == "the old one"
        assert list(tmp_path.iterdir()) == [path]

    def test_a_folder_that_is_missing_is_an_error_of_the_system(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            recording().export(tmp_path / "nowhere" / "page.html")

    @pytest.mark.parametrize(
        ("layers", "error", "text"),
        [
            ([2], IndexError, "export: layers has 2; there are 2, 0 to 1."),
            ([-1], IndexError, "export: layers has -1; there are 2, 0 to 1."),
            ([], ValueError, "export: layers is empty; name at least one"),
            (["0"], TypeError, "export: layers has '0'; the number of a layer is an int."),
            ([True], TypeError, "export: layers has True; the number of a layer is an int."),
            ([0.0], TypeError, "export: layers has 0.0; the number of a layer is an int."),
            ("0", TypeError, "export: layers is '0'; a list of numbers is needed, as in [0, 5]."),
            (0, TypeError, "export: layers is 0; a list of numbers is needed, as in [0, 5]."),
        ],
    )
    def test_layers_that_are_not_there_are_refused(self, tmp_path, layers, error, text):
        with pytest.raises(error, match=re.escape(text)):
            recording().export(tmp_path / "page.html", layers=layers)


class TestBundle:
    def test_every_module_of_the_page_can_be_joined(self):
        modules = [path[:-3] for path in page_paths() if path.endswith(".js")]
        assert {"boot", "map/map", "panels/text", "data/source", "offline/local"} <= set(modules)
        for module in modules:
            assert f"$module_{module.replace('/', '$')} = " in bundle(module)

    def test_the_folders_of_the_page_import_downwards(self):
        below = {
            "drawing": {"drawing"},
            "data": {"data", "drawing"},
            "offline": {"offline", "data"},
            "map": {"map", "data", "drawing"},
            "panels": {"panels", "map", "data", "drawing"},
        }
        for path, file in page_paths().items():
            folder, _, _ = path.rpartition("/")
            if folder and path.endswith(".js"):
                imported = IMPORT.findall(file.read_text(encoding="utf-8"))
                others = {normpath(join(folder, other)).partition("/")[0] for _, other in imported}
                assert others <= below[folder], path

    def test_every_style_sheet_is_in_the_one_that_pages_have(self):
        sheets = [path for path in page_paths() if path.endswith(".css")]
        assert sorted(sheets) == sorted(f"style/{name}.css" for name in SHEETS)
        whole, end = style_sheet(), 0
        for name in SHEETS:
            own = page_paths()[f"style/{name}.css"].read_text(encoding="utf-8")
            assert own.count("\n") <= 500, name
            end = whole.index(own, end) + len(own)
        assert end == len(whole)

    def test_modules_of_folders_are_joined(self, tmp_path):
        (tmp_path / "one").mkdir()
        (tmp_path / "two").mkdir()
        (tmp_path / "a.js").write_text('import { b } from "./one/b.js";\nconst a = b;\n')
        (tmp_path / "one" / "b.js").write_text(
            'import { c } from "../two/b.js";\nimport { d } from "../d.js";\n'
            "export const b = c + d;\n"
        )
        (tmp_path / "two" / "b.js").write_text("export const c = 1;\n")
        (tmp_path / "d.js").write_text("export const d = 2;\n")
        found = bundle("a", tmp_path)
        names = [f"$module_{name} = " for name in ("two$b", "d", "one$b", "a")]
        places = [found.index(name) for name in names]
        assert places == sorted(places)
        assert "const { c } = $module_two$b;" in found

    def test_every_module_parses_and_its_names_stay_its_own(self, open_page, tmp_path):
        (tmp_path / "a.js").write_text(
            'import {\n  b,\n  C,\n} from "./b.js";\nimport { d } from "./d.js";\n'
            "const own = 1;\nexport function a() {\n  return [own, b(), new C().own, d];\n}\n"
        )
        (tmp_path / "b.js").write_text(
            'import { d } from "./d.js";\nconst own = 2;\n'
            "export function b() {\n  return own + d;\n}\n"
            "class C {\n  own = 3;\n}\nexport { C };\n"
        )
        (tmp_path / "d.js").write_text("export const d = 40;\n")
        page = tmp_path / "page.html"
        page.write_text(
            "<!doctype html><link rel=icon href=data:,><script type=module>"
            f"{bundle('a', tmp_path)}window.found = a();</script>"
        )
        assert open_page(page.as_uri()).evaluate("found") == [1, 42, 3, 40]

    @pytest.mark.parametrize(
        ("source", "text"),
        [
            ('import x from "./b.js";', "in no form that can be joined"),
            ('import * as x from "./b.js";', "in no form that can be joined"),
            ('import "./b.js";', "in no form that can be joined"),
            ('import { b as x } from "./b.js";', "none of b's exports"),
            ('import { c } from "./b.js";', "none of b's exports"),
            ('import { c } from "./c.js";', "there is no c.js"),
            ('import { a } from "./a.js";', "a imports a; modules cannot stand in a ring"),
            ('import { b } from "../b.js";', "a imports ../b.js, which is outside of the page"),
            ('import { b } from "./c/b.js";', "there is no c/b.js"),
            ("export default 1;", "in no form that can be joined"),
            ("export let x = 1;", "in no form that can be joined"),
            ('export { b } from "./b.js";', "in no form that can be joined"),
            ("const x = import.meta.url;", "in no form that can be joined"),
            ('const x = await import("./b.js");', "in no form that can be joined"),
            ("await 1;", "in no form that can be joined"),
            ('const x = "</script>";', "an inline script cannot hold"),
            ('const x = "<!--";', "an inline script cannot hold"),
        ],
    )
    def test_what_cannot_be_joined_is_refused(self, tmp_path, source, text):
        (tmp_path / "a.js").write_text(f"{source}\n")
        (tmp_path / "b.js").write_text("export function b() {}\n")
        with pytest.raises(BundleError, match=re.escape(text)):
            bundle("a", tmp_path)
